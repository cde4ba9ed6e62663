"""Warns about a critic whose warm-up was too short, and about a policy far from the one that played the turns.

`watch_warmup` warns if the critic's loss was still changing when its warm-up ended. In that case the actor starts on
advantages from a critic that is still learning, which the warm-up should prevent. The loss is the mean squared error of
values against returns, over the trained tokens of all ranks, before each update.

The second half of the warm-up is tested for a trend with the Mann-Kendall rank test, whose only assumption is that the
noise of single batches is independent. At most 5 % of settled critics cause a warning. At a batch noise of 30 %, a loss
that falls by 5 % per update over a warm-up of 45 updates is found in at least 90 % of runs. With fewer than 16 updates
there is no test. `tests/advantage/test_convergence.py` simulates all three.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.ranks import Group, current_layout
from advantage.settings import AdvantageSettings, PerRun, advantage_flags, advantage_settings

logger = logging.getLogger(__name__)

warmup_losses: PerRun[list[float]] = PerRun(list)
"""The critic's loss before each update of its warm-up, per run."""
SIGNIFICANCE = 0.05
"""Share of settled critics that cause a warning by chance."""
FEWEST_UPDATES = 16
"""Updates that are needed to tell a trend from noise."""


@dataclass(frozen=True)
class Trend:
    """The trend over the second half of a warm-up."""

    change: float
    """Relative change of the loss over the half, from the median slope of its logarithm."""
    chance: float
    """Two-sided p-value: the probability of such an order of losses without a trend."""


def find_trend(losses: Sequence[float]) -> Trend | None:
    """Test the second half of `losses` for a trend; None if there are fewer than 16."""
    if len(losses) < FEWEST_UPDATES:
        return None
    logs = [math.log(max(loss, 1e-12)) for loss in losses[-(len(losses) // 2) :]]
    n = len(logs)
    slopes = [(logs[j] - logs[i]) / (j - i) for i, j in itertools.combinations(range(n), 2)]
    rises = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    chance = math.erfc(max(abs(rises) - 1, 0) / deviation / math.sqrt(2))
    return Trend(math.expm1(statistics.median(slopes) * (n - 1)), chance)


def watch_warmup(
    args: Any, rollout_data: Mapping[str, Any], values: Tensor, returns: Tensor, mask: Tensor, group: Group
) -> Trend | None:
    """Record the loss of one batch of the critic's warm-up; after the last one, test for a trend and log the result.

    Batches after `num_critic_only_steps` and the actor's batches (which have log-probs) are ignored.

    Args:
        values, returns, mask: flat, one entry per response token of this rank's samples.
        group: data parallelism; every rank of the group must call this.

    Returns:
        The trend after the last batch of the warm-up, if there were enough batches; otherwise None.
    """
    flags = advantage_flags(args)
    updates, start = flags.num_critic_only_steps or 0, flags.start_rollout_id
    role = flags.slime_verlog_role
    is_actors = role == "actor" if role else "log_probs" in rollout_data or flags.use_rollout_logprobs
    if not updates or start is None or is_actors:
        return None
    losses = warmup_losses.of(args)
    if start + len(losses) >= updates:
        return None
    losses.append(_mean_squared_error(values, returns, mask, group))
    if start + len(losses) < updates:
        return None
    return _report(losses, advantage_settings(args).critic_warmup.tolerance)


def _report(losses: Sequence[float], tolerance: float) -> Trend | None:
    trend = find_trend(losses)
    if trend is None:
        logger.info(
            "the critic's warm-up had %d updates since the start; at least %d are needed to tell a trend in its loss "
            "from noise",
            *(len(losses), FEWEST_UPDATES),
        )
    elif trend.chance <= SIGNIFICANCE and abs(trend.change) > tolerance:
        logger.warning(
            "the critic had not converged when its warm-up of %d updates ended: its loss moved by %+.0f %% over the "
            "second half (now %.4g; p = %.2g; critic_warmup.tolerance is %.0f %%); lengthen critic_warmup and "
            "--num-critic-only-steps, or change the critic's learning rate",
            *(len(losses), 100 * trend.change, losses[-1], trend.chance, 100 * tolerance),
        )
    else:
        logger.info(
            "no trend beyond critic_warmup.tolerance was found in the critic's loss over the second half of its "
            "warm-up: %+.0f %% (p = %.2g)",
            *(100 * trend.change, trend.chance),
        )
    return trend


def _mean_squared_error(values: Tensor, returns: Tensor, mask: Tensor, group: Group) -> float:
    error = ((returns - values) ** 2 * mask).sum()
    sums = torch.stack([error, mask.sum().to(error)]).double()
    total, count = (float(x) for x in group.total(sums, like=values))
    return total / max(count, 1.0)


@dataclass(frozen=True)
class Limit:
    """The healthy range of one metric: `lowest` to `highest`. Every alarm of a run is one of these."""

    metric: str
    meaning: str
    highest: float
    key: str
    """The YAML key with `highest`; empty if no key changes it."""
    advice: str
    lowest: float = 0.0

    def holds(self, value: float) -> bool:
        """Whether the value is in the range; NaN is not."""
        return self.lowest <= value <= self.highest

    def sentence(self, value: float, when: str) -> str:
        """What is wrong, and what to try."""
        healthy = (
            f"{self.lowest:g} or more" if self.highest == math.inf else f"{self.lowest:g} to {self.highest:g}"
        ) + (f" ({self.key})" if self.key else "")
        return f"{self.meaning} ({self.metric}) is {value:.3g} {when}, and healthy is {healthy}: {self.advice}"


class OffPolicyAlarm:
    """Watches the metrics of a run's training steps."""

    def __init__(self, settings: AdvantageSettings) -> None:
        masked = "pg_clipfrac" if settings.policy_loss == "dis" else "tis_clipfrac"
        self._limits = (
            Limit(
                "train_rollout_logprob_abs_diff",
                "the mean difference between the log-probs of trainer and engine",
                settings.alarm_logprob_abs_diff,
                "alarm_logprob_abs_diff",
                "lower max_staleness or --lr; if no turn is stale, compare the checkpoint, the chat template and the "
                "precision of the two",
            ),
            Limit(
                masked,
                "the share of tokens that the off-policy correction masks or truncates",
                settings.alarm_masked_share,
                "alarm_masked_share",
                "lower max_staleness or --lr, or widen the interval (DIS: --eps-clip and --eps-clip-high; TIS and "
                "IcePop: --tis-clip-low and --tis-clip)",
            ),
        )
        self._outside: set[str] = set()
        """Metrics that were outside their range in the step before."""
        self._steps = 0

    def watch(self, metrics: Mapping[str, float], rollout_id: int) -> dict[str, float]:
        """Check one training step of the actor; warns when a metric leaves its range, not while it stays outside.

        Returns:
            `off_policy_alarms`, the number of this process's steps with a metric outside its range so far; nothing if
            there was nothing to check.
        """
        watched = [limit for limit in self._limits if limit.metric in metrics]
        if not watched:
            return {}
        outside = {limit.metric for limit in watched if not limit.holds(float(metrics[limit.metric]))}
        for limit in watched:
            if limit.metric in outside - self._outside and current_layout().stage.rank == 0:
                logger.warning("%s", limit.sentence(metrics[limit.metric], f"in rollout {rollout_id}"))
        self._outside = outside
        self._steps += bool(outside)
        return {"off_policy_alarms": float(self._steps)}
