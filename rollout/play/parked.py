"""Keeps a bounded number of aborted episodes alive until slime's outer loop hands out their samples again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.bridge.framework import Sample
from rollout.turn import Turn

if TYPE_CHECKING:
    from rollout.play.episode import Episode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parked:
    """A live episode, its turns so far, and the sample that it plays for."""

    sample: Sample
    episode: Episode
    turns: list[Turn]


@dataclass
class ParkedEpisodes:
    """Parked episodes of one runtime, oldest first.

    The key is the identity of the sample object, because indices repeat between training and evaluation. Each entry
    holds its sample, so no other sample can get the same identity.
    """

    dropped: int = 0
    """Episodes closed for lack of room; each starts from the beginning when its sample is handed out again."""
    _parked: dict[int, Parked] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._parked)

    def take(self, sample: Sample) -> Parked | None:
        """Remove and return the sample's episode; None if it is not parked."""
        return self._parked.pop(id(sample), None)

    async def park(self, parked: Parked, most: int) -> None:
        """Park the episode; close the oldest ones if there are more than `most`."""
        self._parked[id(parked.sample)] = parked
        while len(self._parked) > most:
            oldest = self._parked.pop(next(iter(self._parked)))
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("more than %d aborted episodes wait to continue; the oldest ones are closed", most)
            await oldest.episode.close()

    async def close(self) -> None:
        """Close all of them."""
        while self._parked:
            await self._parked.popitem()[1].episode.close()
