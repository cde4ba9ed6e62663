"""A batch of turns: its budget and failures while it is played, then its segments and the age of its turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.errors import EnvironmentFault, FailureBudgetError
from rollout.turn import Segment

if TYPE_CHECKING:
    from rollout.play.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass
class Batch:
    """One batch: the turns that it may still issue while it is played, then its segments in slot order."""

    segments: list[Segment] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    slots: list[Mapping[str, Any]] = field(default_factory=list)
    """The slots' state after the batch; empty unless the slots kept playing after it was cut."""
    staleness: Sequence[int] | None = None
    """Actor updates between playing and training each turn, -1 where unknown; None for kept turns of the warm-up."""
    waited_s: float = 0.0
    """Seconds for which it had enough turns and waited for turns that would have become too old."""
    masked: int = 0
    """Turns that are too old and therefore have no loss."""
    failed: int = 0
    """Episodes whose environment was lost while the batch was played."""
    left: list[int] = field(default_factory=list)
    """Turns left to issue: one number for all slots, or one per slot (`turn_quota: per_env`)."""

    @property
    def turn_count(self) -> int:
        return count_turns(self.segments)

    def issue(self, slot: int) -> bool:
        """Take one turn from the budget that the slot uses, its own or the shared one; False if none is left."""
        place = slot % len(self.left)
        if self.left[place] == 0:
            return False
        self.left[place] -= 1
        return True

    def give_back(self, slot: int) -> None:
        """Return a turn that was issued and not played."""
        self.left[slot % len(self.left)] += 1


def count_failure(fault: EnvironmentFault, failed: int, runtime: Runtime) -> None:
    """Count a lost environment, the `failed`-th of its batch; raises FailureBudgetError beyond the YAML's limit."""
    runtime.counters["episodes_failed"] += 1
    budget = runtime.settings.max_episode_failures_per_batch
    if failed > budget:
        raise FailureBudgetError(
            f"{failed} episodes of one batch failed; max_episode_failures_per_batch is {budget}. Last failure:\n{fault}"
        ) from fault
    logger.warning("episode abandoned (%d of %d allowed): %s", failed, budget, fault)


def count_turns(segments: Sequence[Segment]) -> int:
    """The number of turns in the segments."""
    return sum(len(segment.turns) for segment in segments)
