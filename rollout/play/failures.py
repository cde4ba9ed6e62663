"""Counts the episodes of one batch whose environment was lost, up to the budget."""

from __future__ import annotations

import logging

from rollout.errors import EnvironmentFault, FailureBudgetError
from rollout.play.runtime import Runtime

logger = logging.getLogger(__name__)


class FailureBudget:
    """The episodes that one batch may lose (`max_episode_failures_per_batch`)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._failed = 0

    def count(self, fault: EnvironmentFault) -> None:
        """Count an episode whose environment was lost.

        Raises:
            FailureBudgetError: more episodes of this batch failed than the budget allows.
        """
        self._failed += 1
        self._runtime.counters["episodes_failed"] += 1
        budget = self._runtime.settings.max_episode_failures_per_batch
        if self._failed > budget:
            raise FailureBudgetError(
                f"{self._failed} episodes of one batch failed; max_episode_failures_per_batch is {budget}. "
                f"Last failure:\n{fault}"
            ) from fault
        logger.warning("episode abandoned (%d of %d allowed): %s", self._failed, budget, fault)
