"""A player that runs, as the manager sees it, and the place that it and its successors take."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import EnvironmentFault, PlayerError
from rollout.players.process import REPORT, Launched, Report
from rollout.players.wire import dumps
from rollout.workers.child import Child, ChildLostError
from rollout.workers.utilization import UNUSED, ProcessUsage

logger = logging.getLogger(__name__)

START_S = 1800.0
"""Seconds in which a player must start; on a busy machine or a network disk, its imports may take
minutes."""
HANG_S = 300.0
"""Seconds between two pings, and until one that is not answered counts as a death; whatever a
player plays, its event loop answers at once."""


class RunningPlayer(Child):
    """A running player, and the calls that it has not answered."""

    dumps = staticmethod(dumps)

    def __init__(self, report: Callable[[Report], None], died: Callable[[], None]) -> None:
        """`died` is called when the connection to it is lost without `end`."""
        super().__init__("a rollout process")
        self.launched: Launched | None = None
        self._report = report
        self._died = died
        self._watch: asyncio.Task[None] | None = None

    async def start(self, launched: Launched, args: Any) -> tuple[str, int]:
        """Start and watch the launched process; return its node and id. Raises PlayerError after
        `START_S`."""
        self.launched = launched
        try:
            async with asyncio.timeout(START_S):
                await launched.connect(self)
                node, pid = await self.call("start", args)
        except TimeoutError:
            raise PlayerError(
                f"a rollout process has not started within {START_S:g} s: look for its last output "
                "and whether its node can read the Python packages and the tokenizer, or set "
                "rollout_processes to 1"
            ) from None
        self._watch = asyncio.create_task(self._end_if_hung())
        return node, pid

    async def _end_if_hung(self) -> None:
        try:
            while True:
                async with asyncio.timeout(HANG_S):
                    await self.call("ping")
                await asyncio.sleep(HANG_S)
        except TimeoutError:
            logger.warning("%s has answered nothing for %g s and is ended", self.name, HANG_S)
            self.abort()
        except ChildLostError:
            pass

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of `rollout.players.process.Player`; faults of environments get the player's
        name."""
        try:
            return await super().call(method, *arguments)
        except EnvironmentFault as fault:
            fault.args = (f"{self.name}: {fault}",)
            raise

    def received(self, number: int, what: bool, value: Any) -> None:
        if number == REPORT:
            self._report(value)
        else:
            super().received(number, what, value)

    def connection_lost(self, exc: Exception | None) -> None:
        died = not self.lost
        super().connection_lost(exc)
        if died:
            self.end()
            self._died()

    def end(self) -> None:
        """End the process."""
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
        self.abort()
        if self.launched is not None:
            self.launched.end()
            self.launched = None


@dataclass(eq=False)
class PlayerPlace:
    """One of the processes: the player that runs in it now, and what its predecessors have used."""

    number: int
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
