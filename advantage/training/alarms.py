"""The healthy range of a metric, and the alarms of training steps.

One is about a policy that has moved far from the one that played the turns, one about a critic that
misleads it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advantage.errors import NonFiniteLossError
from advantage.settings import AdvantageSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limit:
    """The healthy range of one metric: `lowest` to `highest`. Every alarm of a run is one of
    these."""

    metric: str
    meaning: str
    highest: float
    key: str
    """The YAML key with `highest`; empty if no key changes it."""
    advice: str
    lowest: float = 0.0
    patience: int = 1
    """Values in a row outside the range after which there is an alarm; single batches are noisy."""

    def holds(self, value: float) -> bool:
        """Tell whether the value is in the range; NaN is not."""
        return self.lowest <= value <= self.highest

    def sentence(self, value: float, when: str) -> str:
        """Say what is wrong, and what to try."""
        if self.lowest == -math.inf:
            healthy = f"{self.highest:g} or less"
        else:
            healthy = f"{self.lowest:g} " + (
                "or more" if self.highest == math.inf else f"to {self.highest:g}"
            )
        healthy += f" ({self.key})" if self.key else ""
        return f"{self.meaning} ({self.metric}) is {value:.3g} {when}, and healthy is {healthy}: {self.advice}"


def check_finite(metrics: Mapping[str, float], rollout_id: int) -> None:
    """Raise NonFiniteLossError if one of a training step's losses is infinite or NaN."""
    for name, value in metrics.items():
        if name.endswith("loss") and not math.isfinite(value):
            raise NonFiniteLossError(
                f"{name} is {float(value)} in rollout {rollout_id}, so training stops: scale the "
                "rewards so that returns stay between about -1 and 10, or lower the learning "
                "rate; the last checkpoint is still good"
            )


def off_policy_alarm(settings: AdvantageSettings) -> StepAlarm:
    """Watch how far the actor is from the policy that played its turns."""
    masked = "pg_clipfrac" if settings.policy_loss == "dis" else "tis_clipfrac"
    limits = (
        Limit(
            "train_rollout_logprob_abs_diff",
            "the mean difference between the log-probs of trainer and engine",
            settings.alarm_logprob_abs_diff,
            "alarm_logprob_abs_diff",
            "lower max_staleness or --lr; if no turn is stale, compare the checkpoint, the chat "
            "template and the precision of the two",
        ),
        Limit(
            masked,
            "the share of tokens that the off-policy correction masks or truncates",
            settings.alarm_masked_share,
            "alarm_masked_share",
            "lower max_staleness or --lr, or widen the interval (DIS: --eps-clip and "
            "--eps-clip-high; TIS and IcePop: --tis-clip-low and --tis-clip)",
        ),
    )
    return StepAlarm("off_policy_alarms", limits)


RETURNS_IN_RANGE = Limit(
    "return_outside_share",
    "the share of turns whose return is outside value_range",
    0.01,
    "",
    "the critic cannot tell these returns from the end of the range; widen value_range to hold "
    "the smallest and the largest (return_min and return_max), and pretrain the critic again if "
    "it was",
)


def critic_alarm() -> StepAlarm:
    """Watch what the critic says about turns that it has not trained on."""
    explains = Limit(
        "explained_variance",
        "the share of the returns' variance that the critic explains",
        math.inf,
        "",
        "a constant would explain 0; train the critic alone first (value_pretraining or "
        "critic_warmup), lower its learning rate, or check that the prompt shows what the "
        "rewards depend on",
        patience=5,
    )
    return StepAlarm("critic_alarms", (explains, RETURNS_IN_RANGE))


class StepAlarm:
    """Watches the metrics of a run's training steps."""

    def __init__(self, counter: str, limits: Sequence[Limit]) -> None:
        self._counter = counter
        self._limits = limits
        self._outside: Counter[str] = Counter()
        """How often in a row each metric was outside its range."""
        self._steps = 0

    def watch(self, metrics: Mapping[str, float], rollout_id: int) -> dict[str, float]:
        """Check one training step; warns when a metric has left its range, not while it stays
        outside.

        Returns, under the alarm's name, this process's steps with an alarm so far, or nothing
        without such metrics.
        """
        # Imported here because it imports torch, which a run's other alarms do not need.
        from advantage.exchange import current_layout

        watched = [limit for limit in self._limits if limit.metric in metrics]
        if not watched:
            return {}
        for limit in watched:
            value = float(metrics[limit.metric])
            self._outside[limit.metric] = (
                0 if limit.holds(value) else self._outside[limit.metric] + 1
            )
            if self._outside[limit.metric] == limit.patience and current_layout().stage.rank == 0:
                logger.warning("%s", limit.sentence(value, f"in rollout {rollout_id}"))
        self._steps += any(self._outside[limit.metric] >= limit.patience for limit in watched)
        return {self._counter: float(self._steps)}
