"""The healthy range of a metric, and the alarm about a policy that has moved far from the one that played the turns."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from advantage.errors import NonFiniteLossError
from advantage.settings import AdvantageSettings

logger = logging.getLogger(__name__)


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
        """Tell whether the value is in the range; NaN is not."""
        return self.lowest <= value <= self.highest

    def sentence(self, value: float, when: str) -> str:
        """Say what is wrong, and what to try."""
        if self.lowest == -math.inf:
            healthy = f"{self.highest:g} or less"
        else:
            healthy = f"{self.lowest:g} " + ("or more" if self.highest == math.inf else f"to {self.highest:g}")
        healthy += f" ({self.key})" if self.key else ""
        return f"{self.meaning} ({self.metric}) is {value:.3g} {when}, and healthy is {healthy}: {self.advice}"


def check_finite(metrics: Mapping[str, float], rollout_id: int) -> None:
    """Raise NonFiniteLossError if one of a training step's losses is infinite or NaN."""
    for name, value in metrics.items():
        if name.endswith("loss") and not math.isfinite(value):
            raise NonFiniteLossError(
                f"{name} is {float(value)} in rollout {rollout_id}, so training stops: scale the rewards so that "
                "returns stay between about -1 and 10, or lower the learning rate; the last checkpoint is still good"
            )


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

        Returns `off_policy_alarms`, this process's steps with a metric outside so far, or nothing without such metrics.
        """
        from advantage.exchange import current_layout  # imports torch, which a run's other alarms need not

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
