"""The loop that plays: every rollout calls `play` with a place, a stop rule, and what to do with each turn."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode
from rollout.turn import FinishReason, Generation, Turn


class ResponseLostError(Exception):
    """The response was lost before the environment could take it; the turn is asked again."""


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
        generation = await ask(episode)
        if generation.finish_reason is FinishReason.ABORT:
            return None
        with suppress(ResponseLostError):
            return await episode.step(generation, time.perf_counter() - began)
