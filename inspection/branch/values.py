"""Values of states from branches: means with intervals, and the share of the returns' variance that states explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST = 4
"""Branches of a state, or episodes of a sample, for an interval."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval, which is None if there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self) -> str:
        """The number and the interval."""
        return f"{self.value:.3f} {self.interval()}"

    def interval(self) -> str:
        """The interval alone; a dash without one."""
        return "–" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"


def return_to_go(turns: Sequence[Mapping[str, Any]], gamma: float) -> float:
    """Return the rewards of an episode's last turns, each discounted by the moves of the environment before it.

    Notes, and turns that an environment marks with `moves: false`, are not discounted.
    """
    total = 0.0
    for turn in reversed(turns):
        moves = turn.get("moves", True) and "summary" not in turn
        total = turn["reward"] + (gamma if moves else 1.0) * total
    return total


def mean_of(returns: Sequence[float]) -> Estimate:
    """The mean with Student's 95 % interval."""
    mean, count = statistics.fmean(returns), len(returns)
    if count < FEWEST:
        return Estimate(mean)
    reach = _t_quantile(count - 1) * statistics.stdev(returns) / math.sqrt(count)
    return Estimate(mean, mean - reach, mean + reach)


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 1 % from 3 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def explainable(states: Sequence[Sequence[float]], episodes: Sequence[int]) -> Estimate:
    """The share of the returns' variance that lies between states: what a perfect critic explains.

    NaN if no return differs. The interval is a percentile bootstrap over episodes, because states of one episode are
    not independent.

    Args:
        states: the returns of each state's branches, at least two.
        episodes: the number of each state's episode.
    """
    return _bootstrap(states, episodes, [math.nan] * len(states))


def explained_by(values: Sequence[float], states: Sequence[Sequence[float]], episodes: Sequence[int]) -> Estimate:
    """The share of the returns' variance that a critic explains with its value of each state; the rest as above."""
    return _bootstrap(states, episodes, values)


def _bootstrap(states: Sequence[Sequence[float]], episodes: Sequence[int], values: Sequence[float]) -> Estimate:
    rows = zip(states, values, strict=True)
    moments = np.array([(np.mean(found), np.var(found, ddof=1), len(found), value) for found, value in rows])
    places = [np.flatnonzero(np.array(episodes) == number) for number in sorted(set(episodes))]
    if len(places) < FEWEST:
        return Estimate(_share(moments))
    draw, shares = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        chosen = np.concatenate([places[k] for k in draw.integers(len(places), size=len(places))])
        shares.append(_share(moments[chosen]))
    low, high = np.nanpercentile(shares, [2.5, 97.5])
    return Estimate(_share(moments), float(low), float(high))


def _share(moments: np.ndarray) -> float:
    """One-way analysis of variance of `moments` [states, 4]: each state's returns' mean, variance, number, and value.

    Means over few branches vary more than the values of states, so the variance within states is subtracted; the share
    is below 0 if the means vary less than luck explains. Without a critic's values (NaN), nothing between states is
    left unexplained.
    """
    means, within, counts, values = moments.T
    luck = (within / counts).mean()
    between = means.var(ddof=1) - luck
    total = between + within.mean()
    left = 0.0 if np.isnan(values).all() else (means - values).var(ddof=1) - luck
    return float((between - left) / total) if total > 0 else math.nan
