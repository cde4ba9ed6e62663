"""Episodes that slime's outer loop aborted and will hand out again: kept alive in between, a bounded number of them."""

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
    """A live episode, its turns so far, and the sample that it plays."""

    sample: Sample
    episode: Episode
    turns: list[Turn]


@dataclass
class ParkedEpisodes:
    """Parked episodes of one runtime, oldest first.

    An episode is known by the sample object itself: indices repeat between training and evaluation. An entry keeps its
    sample alive, so no other sample can have the same identity meanwhile.
    """

    dropped: int = 0
    """Episodes closed because there was no room; each starts anew when its sample is handed out again."""
    _parked: dict[int, Parked] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._parked)

    def take(self, sample: Sample) -> Parked | None:
        """The sample's episode, which is no longer parked afterwards; None if there is none."""
        return self._parked.pop(id(sample), None)

    async def park(self, parked: Parked, most: int) -> None:
        """Keep the episode; close the oldest ones while there are more than `most`."""
        self._parked[id(parked.sample)] = parked
        while len(self._parked) > most:
            oldest = self._parked.pop(next(iter(self._parked)))
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("more than %d aborted episodes wait to go on; the oldest ones start anew", most)
            await oldest.episode.close()

    async def close(self) -> None:
        """Close all of them."""
        while self._parked:
            await self._parked.popitem()[1].episode.close()
