"""The loop that plays: a slot holds the episode, a collector decides when to ask and takes what was
played."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode
from rollout.turn import Generation, Segment, Turn

T = TypeVar("T")


class Slot:
    """Holds at most one live episode; with a stride, plays one after another and starts the next
    one ahead."""

    def __init__(
        self,
        start: Callable[[int], Coroutine[Any, Any, Episode]],
        number: int = 0,
        stride: int | None = None,
        episode: Episode | None = None,
    ) -> None:
        """`start` begins the episode with an id: first `number`, then `number + stride`, and so on;
        None: only one."""
        self.number = number
        self.next_episode = number
        self.episode = episode
        self._start = start
        self._stride = stride
        self._ahead: asyncio.Task[Episode] | None = None

    async def live(self) -> Episode:
        """Return the episode to play, and start the one after it in the background.

        Raises EnvironmentFault if it could not be started; the next call tries the one after it.
        """
        if self.episode is None:
            ahead = self._ahead = self._ahead or self._start_next()
            try:
                self.episode = await ahead
            except EnvironmentFault:
                self._advance()
                raise
            self._advance()
        if self._ahead is None and self._stride is not None:
            self._ahead = self._start_next()
        return self.episode

    def _advance(self) -> None:
        self.next_episode += self._stride or 0
        self._ahead = None

    def _start_next(self) -> asyncio.Task[Episode]:
        task = asyncio.create_task(self._start(self.next_episode))
        # Reads the exception, which asyncio would otherwise log as never retrieved; `live` raises
        # it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def release(self) -> Episode | None:
        """Make room for the next episode; the caller closes the one that is returned."""
        episode = self.episode
        self.episode = None
        return episode

    async def leave(self) -> None:
        """Close the episode."""
        if (episode := self.release()) is not None:
            await episode.close()


class Collector(Protocol):
    """Decides what its slots play, and takes their turns."""

    async def may_issue(self, slot: Slot) -> bool:
        """Wait until the slot's next turn may be issued, and count it; False ends `play`."""
        ...

    async def ask(self, slot: Slot, episode: Episode) -> Generation | None:
        """Return the response to the episode's prompt; None ends `play`, and the episode stays."""
        ...

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Take a finished turn, before its episode may leave the slot."""
        ...

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        """Give up the slot's episode, and with it the turn in flight; may raise
        FailureBudgetError."""
        ...


async def play(slot: Slot, collector: Collector) -> None:
    """Play turns at one slot until the collector issues no more, or gets no response.

    After an EngineError, the episode stays.
    """
    while await collector.may_issue(slot):
        try:
            episode = await slot.live()
            began = time.perf_counter()
            generation = await collector.ask(slot, episode)
            if generation is None:
                return
            turn = await episode.step(generation, time.perf_counter() - began)
        except EnvironmentFault as fault:
            collector.lose(slot, fault)
            await slot.leave()
            continue
        collector.record(slot, episode, turn)
        if episode.stop is not None:
            await slot.leave()


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all and return their results; on the first error, cancel the others and raise that
    error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def count_turns(segments: Iterable[Segment]) -> int:
    """The number of turns in the segments."""
    return sum(len(segment.turns) for segment in segments)
