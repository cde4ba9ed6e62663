"""Where environments run: a thread, a worker process or a Ray actor, each behind one small interface.

Invariant: what a host returns is held to what was asked of it; a worker that answers anything else has lied, and
nothing it says is believed any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import reprlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rollout.errors import EnvironmentFault, MissingDependencyError
from rollout.workers.reply import check_reply, digest
from rollout.workers.worker import HEADER, EnvHost, write_frame

LARGEST_FRAME = 1 << 32
"""Bytes; no reply comes near it, so a worker that announces more is not one of ours."""


GUARD_END_S = 10.0
"""Seconds that a worker's guard has to end everything that the worker started."""


class HostLostError(Exception):
    """The worker behind a host is gone or was given up; its episodes need another one."""


class WorkerLiedError(HostLostError):
    """The worker answered something that is no answer to what it was asked; nothing it says is believed any more."""


class Host(Protocol):
    """One worker. `call` runs one `EnvHost` method; a host that raised `HostLostError` stays lost."""

    lost: bool

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]: ...

    def kill(self) -> None: ...


class InlineHost:
    """A thread of this process. A hung step cannot be killed: its thread is abandoned, and counted."""

    def __init__(self) -> None:
        self.lost = False
        self._host = EnvHost()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="env")

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._host.handle, method, *arguments)

    def kill(self) -> None:
        self.lost = True
        self._thread.shutdown(wait=False, cancel_futures=True)


class ProcessHost:
    """A worker process on a private socket; it ends with this process, however that ends."""

    module = "rollout.workers.worker"
    """Its `main` serves the socket."""

    def __init__(self) -> None:
        self.lost = False
        self._number = 0
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        guard = "from rollout.workers.guard import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", guard, str(theirs.fileno()), self.module, str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=os.getcwd(),
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(sock=self._socket)
            reader, writer = self._streams
            self._number += 1
            ticket = (self._number, arguments[0])
            writer.write(write_frame((ticket, method, arguments)))
            await writer.drain()
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            if size > LARGEST_FRAME:
                raise WorkerLiedError(f"worker process {self.process.pid} announced {size} bytes")
            return self._read(await reader.readexactly(size), ticket)
        except (OSError, EOFError) as error:
            raise HostLostError(f"worker process {self.process.pid} died ({type(error).__name__})") from error

    def _read(self, body: bytes, ticket: tuple[int, int]) -> tuple[bool, Any]:
        """What answers the command `ticket`, which is its number and its episode's key."""
        try:
            answered, outcome = pickle.loads(body)
        except Exception as error:  # a pickle may raise anything at all
            raise WorkerLiedError(f"worker process {self.process.pid} sent no reply: {error!r}") from error
        if answered != ticket:
            raise WorkerLiedError(f"worker process {self.process.pid} answered {answered!r}, asked was {ticket}")
        return outcome

    def kill(self) -> None:
        self.lost = True
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()
        if self.process.returncode is None:
            # Not `terminate`, which would wait for a guard that is dead, and so set its group's number free.
            os.kill(self.process.pid, signal.SIGTERM)
        # A process in the kernel's hands (a dead network disk) ends later, and the loop must not wait for it.
        threading.Thread(target=_reap, args=[self.process], name="env-reaper", daemon=True).start()


def _reap(guard: subprocess.Popen[bytes]) -> None:
    """Wait until a guard has ended everything below it, at most `GUARD_END_S`; then kill what is left of its group.

    Something is left only if the guard itself was killed, or a process cannot be killed.
    """
    deadline = time.monotonic() + GUARD_END_S
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
        while os.waitid(os.P_PID, guard.pid, flags) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # The guard is not waited for yet, so its number cannot have been given to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(guard.pid, signal.SIGKILL)
    guard.wait()


class RayHost:
    """A Ray actor, placed anywhere in the cluster that the training already has."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError("env_backend: ray needs Ray: pip install ray, or use process") from error
        self.lost = False
        self._ray = ray
        # A sliver of a CPU, since Ray spreads only actors that ask for something.
        actor = ray.remote(num_cpus=0.01, max_restarts=0, scheduling_strategy="SPREAD")(EnvHost)
        self._actor = actor.remote()

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            return await self._actor.handle.remote(method, *arguments)
        except self._ray.exceptions.RayError as error:
            raise HostLostError(f"Ray actor died ({type(error).__name__})") from error

    def kill(self) -> None:
        self.lost = True
        self._ray.kill(self._actor)


BACKENDS: dict[str, Callable[[], Host]] = {"inline": InlineHost, "process": ProcessHost, "ray": RayHost}


def check_answer(method: str, arguments: Sequence[Any], answer: Any) -> tuple[bool, Any]:
    """Hold a worker's answer to what was asked: (True, result) or (False, what broke).

    Raises:
        WorkerLiedError: it is of another shape, breaks the environment's contract, or does not match its digests.
    """
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], bool):
        raise WorkerLiedError(f"the worker answered {reprlib.repr(answer)} to {method}")
    ok, result = answer
    if not ok:
        if not isinstance(result, str):
            raise WorkerLiedError(f"the worker reported {reprlib.repr(result)} as a fault")
        return ok, result
    try:
        if method == "replay":
            reply, digests = result
            check_reply(reply)
            played = len(arguments[2])
            if len(digests) != played + 1 or digests[-1] != digest(reply) or (reply.info is None) != (played == 0):
                raise WorkerLiedError("the worker's digests are not those of the episode that it shows")
        elif method == "step":
            check_reply(result)
            if result.info is None:
                raise WorkerLiedError("the worker answered a step without info")
    except (EnvironmentFault, TypeError, ValueError, AttributeError) as error:
        raise WorkerLiedError(f"the worker's answer to {method} is no reply: {error}") from error
    return ok, result
