"""Warns about a policy that has moved far from the one that played the turns."""

import logging
from collections.abc import Mapping

from advantage.ranks import current_layout
from advantage.settings import AdvantageSettings
from advantage.training.limits import Limit

logger = logging.getLogger(__name__)


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
