"""A player that runs, as the manager sees it, and the place that it and its successors take."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import EnvironmentFault, PlayerError
from rollout.players.process import Launched, Report
from rollout.players.wire import Link
from rollout.workers.utilization import UNUSED, ProcessUsage

logger = logging.getLogger(__name__)

START_S = 1800.0
"""Seconds in which a player must start; on a busy machine or a network disk, its imports may take minutes."""
HANG_S = 300.0
"""Seconds between two pings. A player that leaves one unanswered until the next counts as dead; whatever it plays, its
event loop answers at once."""


class ResponseLostError(Exception):
    """A player died while it played a turn; the turn is asked again."""


class RunningPlayer:
    """A running player, and the calls that it has not answered."""

    def __init__(self, report: Callable[[Report], None], died: Callable[[], None]) -> None:
        """`died` is called when the connection to it is lost without `end`."""
        self.lost, self.name = False, "a rollout process"
        self.link = Link(self._receive, self._end)
        self.launched: Launched | None = None
        self._report, self._died = report, died
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._heard = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def start(self, launched: Launched, args: Any) -> tuple[str, int]:
        """Start and watch the launched process; return its node and id. Raises PlayerError after `START_S`."""
        self.launched = launched
        try:
            async with asyncio.timeout(START_S):
                await launched.connect(self.link)
                node, pid = await self.call("start", args)
        except TimeoutError:
            raise PlayerError(
                f"a rollout process has not started within {START_S:g} s: look for its last output and whether its "
                "node can read the Python packages and the tokenizer, or set rollout_processes to 1"
            ) from None
        self._watch = asyncio.create_task(self._end_if_hung())
        return node, pid

    async def _end_if_hung(self) -> None:
        while not self.lost:
            asked = asyncio.get_running_loop().time()
            self.link.send((next(self._numbers), "ping", ()))
            await asyncio.sleep(HANG_S)
            if self._heard < asked and not self.lost:
                logger.warning("a rollout process has answered nothing for %g s and is ended", HANG_S)
                self.link.abort()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of `rollout.players.process.Player`; raises what it raises, or ResponseLostError."""
        if self.lost:
            raise ResponseLostError
        number = next(self._numbers)
        self._calls[number] = answer = asyncio.get_running_loop().create_future()
        self.link.send((number, method, arguments))
        try:
            return await answer
        except EnvironmentFault as fault:
            fault.args = (f"{self.name}: {fault}",)
            raise
        except asyncio.CancelledError:
            self.link.send((number, "cancel", ()))
            raise
        finally:
            self._calls.pop(number, None)

    def _receive(self, answers: list[Any], report: Report | None) -> None:
        self._heard = asyncio.get_running_loop().time()
        if report is not None:
            self._report(report)
        for number, ok, value in answers:
            waiting = self._calls.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(value) if ok else waiting.set_exception(value)

    def _end(self) -> None:
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(ResponseLostError())
        died = not self.lost
        self.end()
        if died:
            self._died()

    def end(self) -> None:
        """End the process."""
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
        self.link.abort()
        if self.launched is not None:
            self.launched.end()
            self.launched = None


@dataclass
class PlayerPlace:
    """One of the processes: the player that runs in it now, and what its predecessors have used."""

    number: int
    episodes: int = 0
    """Open episodes, including those that are being opened."""
    started: bool = False
    """Whether an environment has started in the player."""
    avoided_until: float = 0.0
    """The event loop's time until which others get the episodes."""
    player: RunningPlayer | None = None
    pid: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    usage: ProcessUsage = UNUSED
    """Of the player that runs; it counts from zero."""
    earlier: ProcessUsage = UNUSED
    deaths: deque[int] = field(default_factory=deque)
    """`PlayerProcesses.turns` at its latest deaths."""
