"""Runs environments off the event loop, on threads, worker processes or Ray actors, and survives their faults.

Invariant: a session shows either the episode that its seed and answers decide, or an `EnvironmentFault`; a
worker that dies, hangs or lies is replaced, and its episodes are replayed and compared before they go on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rollout.config import RolloutConfig
from rollout.env_worker import HEADER, EnvHost, EnvReply, EnvSpec, digest, write_frame
from rollout.errors import EnvironmentFault, MissingDependencyError


class HostLostError(Exception):
    """The worker behind a host is gone or was given up; its episodes need another one."""


class ReplayError(EnvironmentFault):
    """The episode cannot be brought back: it is not deterministic, or its replay showed something else."""


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

    def __init__(self) -> None:
        self.lost = False
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from rollout.env_worker import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=os.getcwd(),
        )
        theirs.close()
        self._socket: socket.socket | None = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(sock=self._socket)
            reader, writer = self._streams
            writer.write(write_frame((method, arguments)))
            await writer.drain()
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            return pickle.loads(await reader.readexactly(size))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise HostLostError(f"worker process {self.process.pid} died ({type(error).__name__})") from error

    def kill(self) -> None:
        self.lost = True
        if self._streams is not None:
            self._streams[1].close()
        elif self._socket is not None:
            self._socket.close()
        self.process.kill()
        self.process.wait()


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


class Worker:
    """A host's place in the pool: one command at a time, with a timeout; a lost host is replaced once."""

    def __init__(self, make_host: Callable[[], Host], faults: Counter[str]) -> None:
        self._make_host = make_host
        self._faults = faults
        self._lock = asyncio.Lock()
        self._start_lock = asyncio.Lock()
        self.host: Host | None = None
        self.sessions = 0

    async def call(self, host: Host | None, timeout_s: float, method: str, *arguments: Any) -> tuple[Host, Any]:
        """Run one command on `host`, or on the current host if None; return the host that ran it.

        Raises:
            HostLostError: the host died, hung past `timeout_s`, or was replaced meanwhile.
            EnvironmentFault: the environment raised or broke its contract.
        """
        # Resets wait for one another, so that a step waits for at most one of them.
        if method == "step":
            return await self._run(host, timeout_s, method, *arguments)
        async with self._start_lock:
            return await self._run(host, timeout_s, method, *arguments)

    async def _run(self, host: Host | None, timeout_s: float, method: str, *arguments: Any) -> tuple[Host, Any]:
        async with self._lock:
            if host is None:
                if self.host is None or self.host.lost:
                    self.host = self._make_host()
                host = self.host
            if host.lost:
                raise HostLostError("its worker was replaced")
            try:
                ok, result = await asyncio.wait_for(host.call(method, *arguments), timeout_s)
            except TimeoutError:
                self._faults["timeout"] += 1
                host.kill()
                raise HostLostError(f"{method} took longer than {timeout_s:g} s") from None
            except HostLostError:
                self._faults["worker_died"] += 1
                host.kill()
                raise
            except asyncio.CancelledError:
                # The command's answer would be taken for the next one's.
                host.kill()
                raise
        if not ok:
            self._faults["raised"] += 1
            raise EnvironmentFault(result)
        return host, result

    def kill(self) -> None:
        if self.host is not None and not self.host.lost:
            self.host.kill()


class EnvPool:
    """Places episodes on workers; `faults` counts what went wrong, by kind, and what was replayed."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.faults: Counter[str] = Counter()
        workers = config.env_workers or max(1, min(config.n_env, os.cpu_count() or 1))
        make_host = BACKENDS[config.env_backend]
        self.workers = [Worker(make_host, self.faults) for _ in range(workers)]
        self._keys = itertools.count()

    async def open(self, spec: EnvSpec) -> EnvSession:
        """Build and reset an environment.

        Raises:
            EnvironmentFault: it could not be started within the retries allowed.
        """
        return await self.reopen(spec, (), ())

    async def reopen(self, spec: EnvSpec, responses: Sequence[str], digests: Sequence[str]) -> EnvSession:
        """Build an environment and play `responses` again; what it shows must match `digests`.

        Raises:
            EnvironmentFault: as `open`, or the replay differs.
        """
        session = EnvSession(self, min(self.workers, key=lambda w: w.sessions), next(self._keys), spec)
        session.responses, session.digests = list(responses), list(digests)
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

    def close(self) -> None:
        """End every worker; open sessions are lost with them."""
        for worker in self.workers:
            worker.kill()


class EnvSession:
    """One episode's environment, wherever it lives; remembers what is needed to build it again."""

    def __init__(self, pool: EnvPool, worker: Worker, key: int, spec: EnvSpec) -> None:
        self.spec = spec
        self.responses: list[str] = []
        self.digests: list[str] = []
        self.reply: EnvReply | None = None
        self._pool, self._worker, self._key = pool, worker, key
        self._host: Host | None = None
        self._open = True
        worker.sessions += 1

    async def start(self) -> EnvReply:
        """Reset the environment and, if it already has answers, play them again."""
        return await self._attempt(None)

    async def step(self, response_text: str) -> EnvReply:
        """Take one step.

        Raises:
            EnvironmentFault: the environment broke and could not be brought back; the text holds the task,
                seed and answers that reproduce it.
        """
        reply = await self._attempt(response_text)
        self.responses.append(response_text)
        return reply

    async def _attempt(self, response_text: str | None) -> EnvReply:
        config = self._pool.config
        failure = "not tried"
        for _ in range(config.max_env_retries_per_turn + 1):
            try:
                if self._host is None:
                    await self._rebuild()
                if response_text is not None:
                    self._host, self.reply = await self._worker.call(
                        self._host, config.env_step_timeout_s, "step", self._key, response_text
                    )
                    self.digests.append(digest(self.reply))
                assert self.reply is not None
                return self.reply
            except ReplayError as error:
                failure = str(error)
                break
            except (HostLostError, EnvironmentFault) as error:
                failure = str(error)
                self._host = None
        raise EnvironmentFault(f"{failure}\n{self.describe(response_text)}")

    async def _rebuild(self) -> None:
        """Start or replay the episode on the worker's current host."""
        config = self._pool.config
        if self.responses and self.reply is not None and not self.reply.deterministic:
            raise ReplayError("the environment is not deterministic, so its episode cannot be replayed")
        timeout_s = config.env_reset_timeout_s + config.env_step_timeout_s * len(self.responses)
        host, (self.reply, digests) = await self._worker.call(
            None, timeout_s, "replay", self._key, self.spec, self.responses
        )
        if self.digests and digests != self.digests:
            self._pool.faults["replay_mismatch"] += 1
            step = next((i for i, (a, b) in enumerate(zip(digests, self.digests, strict=False)) if a != b), 0)
            raise ReplayError(f"the replayed episode differs from the first one at step {step}")
        if self.digests:
            self._pool.faults["replayed"] += 1
        self._host, self.digests = host, digests

    def describe(self, response_text: str | None = None) -> str:
        """What reproduces this episode: environment, task, seed, answers."""
        answers = [*self.responses, *([response_text] if response_text is not None else [])]
        return (
            f"to reproduce: environment {self.spec.env_path}, task {self.spec.metadata.get('task')!r}, "
            f"seed {self.spec.metadata.get('seed')}, options {json.dumps(dict(self.spec.options), default=str)}, "
            f"{len(answers)} answers: {json.dumps(answers)[:20000]}"
        )

    async def close(self) -> None:
        """Free the environment; a worker that is already lost took it along."""
        if not self._open:
            return
        self._open = False
        self._worker.sessions -= 1
        if self._host is not None and not self._host.lost:
            try:
                await self._worker.call(self._host, self._pool.config.env_step_timeout_s, "close", self._key)
            except (HostLostError, EnvironmentFault):
                self._pool.faults["close_failed"] += 1
