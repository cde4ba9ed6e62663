"""The loop that plays: every rollout calls `play` with a place, a stop rule, and what to do with each turn.

`Batch` is the budget of turns of the loops that stop after a number of turns, and then what they played.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.errors import EnvironmentFault, FailureBudgetError
from rollout.play.episode import Episode
from rollout.turn import FinishReason, Generation, Segment, Turn

if TYPE_CHECKING:
    from rollout.play.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ResponseLostError(Exception):
    """A player died while it played a turn; the turn is asked again."""


class Place:
    """Holds at most one live episode."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Episode]], episode: Episode | None = None) -> None:
        """`start` begins an episode when one is needed."""
        self.episode = episode
        self._start = start

    async def live(self) -> Episode:
        """Return the episode to play; raises EnvironmentFault if it could not be started."""
        if self.episode is None:
            self.episode = await self._start()
        return self.episode

    def release(self) -> Episode | None:
        """Make room for the next episode; the caller closes the one that is returned."""
        episode, self.episode = self.episode, None
        return episode

    async def leave(self) -> None:
        """Close the episode."""
        if (episode := self.release()) is not None:
            await episode.close()


class Slot(Place):
    """Plays one episode after another, with the ids `next_episode`, `next_episode + stride`, and so on."""

    def __init__(
        self, number: int, next_episode: int, stride: int, open_id: Callable[[int], Coroutine[Any, Any, Episode]]
    ) -> None:
        """`open_id` starts the episode with the given id."""
        super().__init__(lambda: open_id(self.next_episode))
        self.number = number
        self.next_episode = next_episode
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
        if self._ahead is None:
            self._ahead = self._start_next()
        return self.episode

    def _advance(self) -> None:
        self.next_episode, self._ahead = self.next_episode + self._stride, None

    def _start_next(self) -> asyncio.Task[Episode]:
        task = asyncio.create_task(self._start())
        # Reads the exception, which asyncio would otherwise log as never retrieved; `live` raises it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task


async def play(
    place: Place,
    may_issue: Callable[[], Awaitable[bool]],
    ask: Callable[[Episode], Awaitable[Generation]],
    record: Callable[[Episode, Turn], Any],
    lose: Callable[[EnvironmentFault], Any],
) -> None:
    """Play turns at one place until `may_issue` answers False or `ask` returns an aborted generation.

    `may_issue` waits until the next turn may be issued and counts it. `record` takes each finished turn before its
    episode may leave the place, `lose` a lost environment and with it the turn in flight. After an EngineError, the
    episode stays.
    """
    while await may_issue():
        try:
            episode = await place.live()
            turn = await _next_turn(episode, ask)
        except EnvironmentFault as fault:
            lose(fault)
            await place.leave()
            continue
        if turn is None:
            return
        record(episode, turn)
        if episode.stop is not None:
            await place.leave()


async def _next_turn(episode: Episode, ask: Callable[[Episode], Awaitable[Generation]]) -> Turn | None:
    """Ask for a response and step the environment with it; None if the response was aborted."""
    while True:
        began = time.perf_counter()
        try:
            generation = await ask(episode)
            if generation.finish_reason is FinishReason.ABORT:
                return None
            return await episode.step(generation, time.perf_counter() - began)
        except ResponseLostError:
            episode.runtime.counters["turns_interrupted"] += 1


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all and return their results; on the first error, cancel the others and raise that error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


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
