"""Where environments run: a thread, a worker process or a Ray actor, each behind the interface `Host`."""

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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from envs.loading import thread_loop
from rollout.errors import MissingDependencyError
from rollout.turn import EnvReply
from rollout.workers.reply import HEADER

READ_AHEAD = 1 << 20
"""Bytes of a reply that are buffered before the socket waits; images are larger than asyncio's default."""
GUARD_END_S = 10.0
"""Seconds in which a worker's guard must end everything that the worker started."""


class HostLostError(Exception):
    """The worker is gone or was given up; its episodes need another one."""


class BadReplyError(HostLostError):
    """The worker sent something other than a reply to its command."""


class Host(Protocol):
    """One worker. `call` runs one `EnvHost` method; a host that has raised `HostLostError` stays lost."""

    lost: bool

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]: ...

    def kill(self) -> None: ...


def start_thread() -> ThreadPoolExecutor:
    """Return the one thread of an inline host; like the main thread, it has an event loop."""
    set_loop = lambda: asyncio.set_event_loop(thread_loop())
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="env", initializer=set_loop)


class InlineHost:
    """A thread of this process. A hung step cannot be killed, so its thread is abandoned."""

    def __init__(self) -> None:
        from rollout.workers.worker import EnvHost  # environment code, which otherwise runs in other processes

        self.lost = False
        self._host = EnvHost()
        self._thread = start_thread()

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._host.handle, method, *arguments)

    def kill(self) -> None:
        if not self.lost:
            self._thread.submit(lambda: thread_loop().close())
        self.lost = True
        self._thread.shutdown(wait=False)


def start_guarded(module: str, output: int | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `module.main` with one end of a private socket; return its guard and the other end.

    It ends with this process, together with all that it started (`rollout/workers/guard.py`). What it prints goes to
    the file `output`, or where this process prints.
    """
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    if output is not None:
        environment["PYTHONUNBUFFERED"] = "1"  # a worker that is killed has printed all it said
    guard = "from rollout.workers.guard import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", guard, str(theirs.fileno()), module, str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=os.getcwd(),
        start_new_session=True,
    )
    theirs.close()
    return process, ours


def end_guarded(guard: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    if guard.returncode is None:
        # Not `terminate`: it reaps a dead guard, after which its process group's number may be reused.
        os.kill(guard.pid, signal.SIGTERM)
    # A process in uninterruptible sleep (a dead network disk) ends later; the event loop must not wait for it.
    threading.Thread(target=_reap, args=[guard], name="env-reaper", daemon=True).start()


class ProcessHost:
    """A worker process on a private socket; it ends when this process does, for whatever reason."""

    module = "rollout.workers.worker"
    """The module whose `main` serves the socket."""

    def __init__(self, output: int | None = None) -> None:
        """Start the worker. What it prints goes to the file `output`, or where this process prints."""
        self.lost = False
        self._number = 0
        self.process, self._socket = start_guarded(self.module, output)
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            if self._connection is None:
                self._connection = await asyncio.open_connection(sock=self._socket, limit=READ_AHEAD)
            replies, commands = self._connection
            self._number += 1
            commands.write(pickle.dumps((self._number, method, arguments), pickle.HIGHEST_PROTOCOL))
            (length,) = HEADER.unpack(await replies.readexactly(HEADER.size))
            return self._read(await replies.readexactly(length))
        except (OSError, EOFError) as error:
            raise HostLostError(f"worker process {self.process.pid} died ({type(error).__name__})") from error

    def _read(self, body: bytes) -> tuple[bool, Any]:
        try:
            ticket, answer = pickle.loads(body)
        except Exception as error:  # unpickling may raise anything
            raise BadReplyError(f"the reply of worker process {self.process.pid} cannot be read: {error!r}") from error
        if ticket != self._number:
            raise BadReplyError(
                f"worker process {self.process.pid} answered command {ticket!r} instead of command {self._number}"
            )
        return answer

    def kill(self) -> None:
        self.lost = True
        if self._connection is not None:
            self._connection[1].close()
        else:
            self._socket.close()
        end_guarded(self.process)


def _reap(guard: subprocess.Popen[bytes]) -> None:
    """Give a guard `GUARD_END_S` to end its descendants, then kill what is left of its process group."""
    deadline = time.monotonic() + GUARD_END_S
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # already reaped elsewhere
        while os.waitid(os.P_PID, guard.pid, flags) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # The guard is not reaped yet, so its number cannot belong to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(guard.pid, signal.SIGKILL)
    guard.wait()


class RayHost:
    """A Ray actor on any node of the cluster."""

    def __init__(self) -> None:
        from rollout.workers.worker import EnvHost

        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError("env_backend: ray needs Ray: pip install ray, or use process") from error
        self.lost = False
        self._ray: Any = ray  # Ray's annotations do not cover actors made from a class
        # Ray spreads only actors that request a resource, hence the hundredth of a CPU.
        options = {"num_cpus": 0.01, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._actor = self._ray.remote(**options)(EnvHost).remote()

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            return await self._actor.handle.remote(method, *arguments)
        except self._ray.exceptions.RayError as error:
            raise HostLostError(f"Ray actor died ({type(error).__name__})") from error

    def kill(self) -> None:
        self.lost = True
        self._ray.kill(self._actor)


BACKENDS: dict[str, Callable[[], Host]] = {"inline": InlineHost, "process": ProcessHost, "ray": RayHost}


def check_answer(method: str, answer: Any) -> tuple[bool, Any]:
    """Return (True, result) or (False, the fault as text); raises BadReplyError for a reply of another shape."""
    match method, answer:
        case _, (False, str() as fault):
            return False, fault
        case "close", (True, None):
            return True, None
        case "suggest", (True, str() as answer):
            return True, answer
        case ("step", (True, EnvReply(info=Mapping()) as result)) | ("replay", (True, (EnvReply(), list()) as result)):
            return True, result
    raise BadReplyError(f"the worker answered {reprlib.repr(answer)} to {method}")
