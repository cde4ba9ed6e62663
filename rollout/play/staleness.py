"""How many actor updates lie between the weights that played a turn and the weights that train on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.turn import Generation


@dataclass
class WeightClock:
    """Counts actor updates behind rollout ids and behind the engine's weight versions.

    The trainer pushes its weights to the engine every `interval` rollouts, and each push raises the version by one.
    Versions may begin with any number: the first batch of a process is played with the weights of its first rollout.
    """

    interval: int = 1
    """Rollouts between two pushes (`--update-weights-interval`)."""
    frozen: int = 0
    """Rollouts at the start of the run in which the actor does not train (`--num-critic-only-steps`)."""
    first: tuple[int, int] | None = None
    """Rollout id and weight version of the first batch; None until an engine has answered."""

    def start(self, rollout_id: int, versions: Iterable[int | None]) -> None:
        """Take the oldest of these versions as that of the rollout, unless a first one is known."""
        if self.first is None and (known := [version for version in versions if version is not None]):
            self.first = rollout_id, min(known)

    def updates_before(self, rollout_id: int) -> int:
        """Actor updates before the batch of this rollout is trained on."""
        return max(0, rollout_id - self.frozen)

    def updates_in(self, version: int) -> int:
        """Actor updates in the weights of this version."""
        assert self.first is not None, "no version is known yet"
        rollout_id, first = self.first
        return self.updates_before(rollout_id + (version - first) * self.interval)

    def staleness(self, version: int, rollout_id: int) -> int:
        """Actor updates between playing a turn with this version and training it in this rollout."""
        return max(0, self.updates_before(rollout_id) - self.updates_in(version))


def version_of(generation: Generation) -> int | None:
    """The oldest weight version that produced a token; None if the engine does not number its weights."""
    found = [int(v) for v in generation.weight_versions if v.isdecimal() and len(v) < 20]
    return min(found, default=None)
