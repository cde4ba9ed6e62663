"""Runs environments off the event loop, on threads, worker processes or Ray actors, and survives their faults.

Invariant: a session shows either the episode that its seed and answers decide, or an `EnvironmentFault`; a
worker that dies, hangs or lies is replaced, and its episodes are replayed and compared before they go on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.spec import EnvSpec
from rollout.utilization import Load
from rollout.workers.hosts import BACKENDS, Host, HostLostError, WorkerLiedError, check_answer
from rollout.workers.observation_limits import ObservationLimits
from rollout.workers.reply import EnvReply, digest

BOUNDARIES = {"ToolError": "tool_raised", "JudgeError": "judge_raised"}
"""How a fault is counted that crossed another boundary inside of the environment, by its error's name."""


class ReplayError(EnvironmentFault):
    """The episode cannot be brought back: it is not deterministic, or its replay showed something else."""


class Worker:
    """A host's place in the pool: one command at a time, with a timeout; a lost host is replaced once."""

    def __init__(self, make_host: Callable[[], Host], faults: Counter[str], load: Load) -> None:
        self._make_host = make_host
        self._faults = faults
        self._load = load
        self._lock = asyncio.Lock()
        self._start_lock = asyncio.Lock()
        self.host: Host | None = None
        self.sessions = 0
        self._closed = False

    async def call(self, host: Host | None, timeout_s: float, method: str, *arguments: Any) -> tuple[Host, Any]:
        """Run one command on `host`, or on the current host if None; return the host that ran it.

        Raises:
            HostLostError: the host died, hung past `timeout_s`, or was replaced meanwhile.
            EnvironmentFault: the environment raised or broke its contract.
        """
        self._load.change(+1)
        try:
            # Resets wait for one another, so that a step waits for at most one of them.
            if method == "step":
                return await self._run(host, timeout_s, method, *arguments)
            async with self._start_lock:
                return await self._run(host, timeout_s, method, *arguments)
        finally:
            self._load.change(-1)

    async def _run(self, host: Host | None, timeout_s: float, method: str, *arguments: Any) -> tuple[Host, Any]:
        async with self._lock:
            if host is None:
                if self._closed:
                    raise HostLostError("the pool is closed")
                if self.host is None or self.host.lost:
                    self.host = self._make_host()
                host = self.host
            if host.lost:
                raise HostLostError("its worker was replaced")
            try:
                answer = await asyncio.wait_for(host.call(method, *arguments), timeout_s)
                ok, result = check_answer(method, arguments, answer)
            except TimeoutError:
                self._faults["timeout"] += 1
                host.kill()
                raise HostLostError(f"{method} took longer than {timeout_s:g} s") from None
            except HostLostError as error:
                self._faults["worker_lied" if isinstance(error, WorkerLiedError) else "worker_died"] += 1
                host.kill()
                raise
            except asyncio.CancelledError:
                # The command's answer would be taken for the next one's.
                host.kill()
                raise
        if not ok:
            self._faults[BOUNDARIES.get(result.partition(":")[0], "raised")] += 1
            raise EnvironmentFault(result)
        return host, result

    def kill(self) -> None:
        """End the host for good: an episode that is still being made ready must not start another one."""
        self._closed = True
        if self.host is not None and not self.host.lost:
            self.host.kill()


class EnvPool:
    """Places episodes on workers.

    `faults` counts what went wrong, by kind, and what was replayed; `load` the commands that wait or run.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.faults: Counter[str] = Counter()
        self.load = Load()
        workers = settings.env_workers or max(1, min(settings.n_env, os.cpu_count() or 1))
        self._limits = ObservationLimits(settings.max_observation_chars, settings.max_observation_images)
        make_host = BACKENDS[settings.env_backend]
        self.workers = [Worker(make_host, self.faults, self.load) for _ in range(workers)]
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
        spec = replace(spec, limits=self._limits)
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
        settings = self._pool.settings
        failure = "not tried"
        for _ in range(settings.max_env_retries_per_turn + 1):
            try:
                if self._host is None:
                    await self._rebuild()
                if response_text is not None:
                    self._host, self.reply = await self._worker.call(
                        self._host, settings.env_step_timeout_s, "step", self._key, response_text
                    )
                    self.digests.append(digest(self.reply))
                assert self.reply is not None
                if self.reply.left_out:
                    self._pool.faults["observation_cut"] += 1
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
        settings = self._pool.settings
        if self.responses and self.reply is not None and not self.reply.deterministic:
            raise ReplayError("the environment is not deterministic, so its episode cannot be replayed")
        timeout_s = settings.env_reset_timeout_s + settings.env_step_timeout_s * len(self.responses)
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
                await self._worker.call(self._host, self._pool.settings.env_step_timeout_s, "close", self._key)
            except (HostLostError, EnvironmentFault):
                self._pool.faults["close_failed"] += 1
