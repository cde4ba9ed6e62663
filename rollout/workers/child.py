"""Child processes: starting one, calling its methods, and ending it. Environment workers and
players are children.

A message is a length and the pickle of a tuple: (number, method, arguments) to the child, and
(number, True, result) or (number, False, error) back. Messages are unpickled, so only private
sockets and authenticated connections may carry them.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

HEADER = struct.Struct("!Q")
"""The number of bytes of the pickle that follows."""
GUARD_END_S = 10.0
"""Seconds in which a child's guard must end everything that the child started."""


class ChildLostError(Exception):
    """The child died or was given up."""


class BadReplyError(ChildLostError):
    """The child sent something other than replies to its calls."""


class Channel(asyncio.Protocol):
    """One end of a connection. All messages of one tick of the event loop are one write."""

    dumps: Callable[[Any], bytes] = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._outbox: list[bytes] = []

    def received(self, number: int, what: Any, value: Any) -> None:
        """Take a message, which has the number of its call; an error here ends the connection."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            body = self._data[HEADER.size : end]
            del self._data[:end]
            self.received(*pickle.loads(body))

    def send(self, *message: Any) -> None:
        """Send a message, or do nothing once the connection is lost; raises what pickling
        raises."""
        body = self.dumps(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += HEADER.pack(len(body)), body

    def _flush(self) -> None:
        data = b"".join(self._outbox)
        self._outbox = []
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Child(Channel):
    """A child process as its parent sees it, and the calls that it has not answered."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.lost = False
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method in the child and return its result; raises what the child sends, or
        ChildLostError.

        A call that is cancelled is cancelled in the child, too, which replies nonetheless.
        """
        if self.lost:
            raise ChildLostError(f"{self.name} was given up")
        number = next(self._numbers)
        self.send(number, method, arguments)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[number]
        except asyncio.CancelledError:
            self.send(number, "cancel", ())
            raise

    def received(self, number: int, what: bool, value: Any) -> None:
        """Take a reply; one that nobody waits for raises KeyError, which ends the connection."""
        reply = self._calls.pop(number)
        if not reply.done():
            reply.set_result(value) if what else reply.set_exception(value)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        error: ChildLostError = ChildLostError(f"{self.name} died")
        if exc is not None and not isinstance(exc, OSError):
            error = BadReplyError(f"{self.name} sent a malformed reply: {exc!r}")
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)


def start_guarded(entry: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs the function `entry` (`module:name`); return its guard and a socket
    to it.

    It ends with this process, together with all that it started (`rollout/workers/guard.py`). What
    it prints goes to stderr.
    """
    ours, theirs = socket.socketpair()
    guard = "from rollout.workers.guard import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", guard, str(theirs.fileno()), entry, str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )
    theirs.close()
    return process, ours


def end_guarded(guard: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    guard.terminate()
    # A process in uninterruptible sleep (a dead network disk) ends later; the event loop must not
    # wait for it.
    threading.Thread(target=_reap, args=[guard], name="child-reaper", daemon=True).start()


def _reap(guard: subprocess.Popen[bytes]) -> None:
    """Give a guard `GUARD_END_S` to end its descendants, then kill what is left of its process
    group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(GUARD_END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guard.pid, signal.SIGKILL)
    guard.wait()
