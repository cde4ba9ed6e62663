"""Values of states from branches: means with intervals, and the share of the returns' variance that
states explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inspection.records import Record
from rollout.turn import discounted_return

FEWEST = 4
"""Branches of a state, or episodes of a sample, for an interval."""
RESAMPLES = 1000
QUANTILES = {60: 2.0, 30: 2.042, 15: 2.131, 10: 2.228, 7: 2.365, 5: 2.571, 4: 2.776, 3: 3.182}
"""The 97.5 % quantiles of Student's t, by degrees of freedom; one in between takes that of fewer,
which is larger."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval, which is None if there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def interval(self) -> str:
        """The interval as text; a dash without one."""
        return (
            "–" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"
        )


def return_to_go(turns: Sequence[Record], gamma: float) -> float:
    """Return the rewards of an episode's last turns, each discounted by the moves of the
    environment before it.

    Notes, and turns that an environment marks with `moves: false`, are not discounted.
    """
    moved = [(turn["reward"], turn.get("moves", True) and "summary" not in turn) for turn in turns]
    return discounted_return(moved, gamma)


def mean_of(returns: Sequence[float]) -> Estimate:
    """The mean with Student's 95 % interval."""
    mean = statistics.fmean(returns)
    freedom = len(returns) - 1
    if len(returns) < FEWEST:
        return Estimate(mean)
    quantile = next(quantile for least, quantile in QUANTILES.items() if freedom >= least)
    reach = quantile * statistics.stdev(returns) / math.sqrt(len(returns))
    return Estimate(mean, mean - reach, mean + reach)


def explained(
    states: Sequence[Sequence[float]],
    episodes: Sequence[int],
    values: Sequence[float] | None = None,
) -> Estimate:
    """The share of the returns' variance that lies between states: what a perfect critic explains.

    With a critic's value of each state, the share that this critic explains. NaN if no return
    differs. The interval is a percentile bootstrap over episodes, because states of one episode are
    not independent.

    Args:
        states: the returns of each state's branches, at least two.
        episodes: the number of each state's episode.
    """
    values = [math.nan] * len(states) if values is None else values
    rows = zip(states, values, strict=True)
    moments = np.array(
        [(np.mean(found), np.var(found, ddof=1), len(found), value) for found, value in rows]
    )
    share = _share(moments)
    numbers = np.unique(episodes)
    if len(numbers) < FEWEST:
        return Estimate(share)
    of_episode = [moments[np.equal(episodes, number)] for number in numbers]
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(len(of_episode), size=len(of_episode))
        shares.append(_share(np.concatenate([of_episode[k] for k in chosen])))
    low, high = np.nanpercentile(shares, [2.5, 97.5])
    return Estimate(share, float(low), float(high))


def _share(moments: np.ndarray) -> float:
    """One-way analysis of variance of `moments` [states, 4]: each state's returns' mean, variance,
    number, and value.

    Means over few branches vary more than the values of states, so the variance within states is
    subtracted; the share is below 0 if the means vary less than luck explains. Without a critic's
    values (NaN), nothing between states is left unexplained.
    """
    means, within, counts, values = moments.T
    luck = (within / counts).mean()
    between = means.var(ddof=1) - luck
    total = between + within.mean()
    left = 0.0 if np.isnan(values).all() else (means - values).var(ddof=1) - luck
    return float((between - left) / total) if total > 0 else math.nan
