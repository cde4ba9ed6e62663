"""Runs environments on threads, worker processes or Ray actors, and recovers from their faults.

A session either shows the episode that its seed and responses determine, or raises
`EnvironmentFault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from envs.call_form import CallForm
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault, WorkerFault
from rollout.spec import DEFAULT_MAX_TURNS, EnvSpec, ObservationLimits
from rollout.turn import EnvReply
from rollout.workers.abilities import suggest
from rollout.workers.child import BadReplyError, ChildLostError
from rollout.workers.hosts import BACKENDS, Host
from rollout.workers.utilization import Utilization

Result = TypeVar("Result")

BOUNDARIES = {"ToolError": "tool_raised", "JudgeError": "judge_raised"}
"""Errors inside an environment that are counted apart from `raised`, by class name."""


class ReplayError(EnvironmentFault):
    """The episode cannot be replayed: it is not deterministic, or its replay differed."""


class TooSlowError(ChildLostError):
    """The worker was given up because a command took too long."""


class Worker:
    """A place in the pool: runs one command at a time on its host, with a timeout, and replaces a
    lost host."""

    def __init__(
        self, make_host: Callable[[], Host], faults: Counter[str], utilization: Utilization
    ) -> None:
        self._make_host = make_host
        self._faults = faults
        self._utilization = utilization
        self._lock = asyncio.Lock()
        self._start_lock = asyncio.Lock()
        self.host: Host | None = None
        self.sessions = 0
        self._closed = False

    async def call(
        self, host: Host | None, timeout_s: float, method: str, *arguments: Any
    ) -> tuple[Host, Any]:
        """Run a method of `workers.worker.EnvHost` on `host`, or the current one if None; return
        the host that ran it.

        `step` there calls the environment and checks what it returns.

        Raises:
            ChildLostError: the host died, took too long, sent a malformed reply, or was replaced.
            WorkerFault: the environment raised or broke its contract.
        """
        with self._utilization.request():
            # Resets wait for each other first, so a step waits for at most one reset.
            async with contextlib.nullcontext() if method == "step" else self._start_lock:
                return await self._run(host, timeout_s, method, *arguments)

    async def _run(
        self, host: Host | None, timeout_s: float, method: str, *arguments: Any
    ) -> tuple[Host, Any]:
        async with self._lock:
            host = self._current_host() if host is None else host
            if host.killed:
                raise ChildLostError("its worker was replaced")
            try:
                async with asyncio.timeout(timeout_s):
                    return host, await host.call(method, *arguments)
            except WorkerFault as fault:
                self._faults[BOUNDARIES.get(fault.kind, "raised")] += 1
                raise
            except TimeoutError:
                self._faults["timeout"] += 1
                host.kill()
                raise TooSlowError(f"{method} took longer than {timeout_s:g} s") from None
            except ChildLostError as error:
                self._faults[
                    "bad_reply" if isinstance(error, BadReplyError) else "worker_died"
                ] += 1
                host.kill()
                raise
            except asyncio.CancelledError:
                host.kill()  # otherwise its late reply would delay the next command
                raise

    def _current_host(self) -> Host:
        if self._closed:
            raise ChildLostError("the pool is closed")
        if self.host is None or self.host.killed:
            try:
                self.host = self._make_host()
            except OSError as error:  # too many processes or files, perhaps for a moment only
                raise ChildLostError(f"no worker can be started: {error}") from error
        return self.host

    def kill(self) -> None:
        """End the host, and start no other for episodes that are still being prepared."""
        self._closed = True
        if self.host is not None and not self.host.killed:
            self.host.kill()


class EnvPool:
    """Places episodes on workers.

    `faults` counts faults and replays by kind, `utilization` counts waiting and running commands.
    """

    def __init__(self, settings: RolloutSettings, call_form: CallForm | None = None) -> None:
        """`call_form`: how the policy's chat template writes calls, if it has its own form."""
        self.settings = settings
        self._call_form = call_form
        self.faults: Counter[str] = Counter()
        self.utilization = Utilization()
        workers = settings.env_workers or max(1, min(settings.n_env, os.cpu_count() or 1))
        self._limits = ObservationLimits(
            settings.max_observation_chars, settings.max_observation_images
        )
        make_host = BACKENDS[settings.env_backend]
        self.workers = [Worker(make_host, self.faults, self.utilization) for _ in range(workers)]
        self._keys = itertools.count()

    async def open(self, spec: EnvSpec) -> EnvSession:
        """Build and reset an environment; raises EnvironmentFault after `max_env_retries_per_turn`
        failed restarts."""
        spec = replace(spec, limits=self._limits, call_form=self._call_form)
        session = EnvSession(
            self, min(self.workers, key=lambda w: w.sessions), next(self._keys), spec
        )
        try:
            await session.ensure()
        except BaseException:
            await session.close()
            raise
        return session

    def close(self) -> None:
        """End every worker; open sessions are lost with them."""
        for worker in self.workers:
            worker.kill()


class EnvSession:
    """One episode's environment, on whichever worker holds it, and what is needed to build it
    again."""

    def __init__(self, pool: EnvPool, worker: Worker, key: int, spec: EnvSpec) -> None:
        self.spec = spec
        self.responses: list[str] = []
        self.digests: list[str] = []
        self.reply: EnvReply | None = None
        self.replayed = False
        """Whether the turns are those of an earlier process, which has counted what happened in
        them."""
        self._pool = pool
        self._worker = worker
        self._key = key
        self._host: Host | None = None
        self._open = True
        worker.sessions += 1

    @property
    def turn_limit(self) -> int | None:
        """Turns after which the episode ends: `max_turns`, or `DEFAULT_MAX_TURNS` without any
        limit.

        None if only the environment's own limit applies.
        """
        unlimited = self.reply is not None and not self.reply.max_steps
        return self.spec.max_turns or (DEFAULT_MAX_TURNS if unlimited else None)

    async def step(self, response_text: str) -> EnvReply:
        """Take one step.

        Raises:
            EnvironmentFault: the episode could not be restored; the text holds what reproduces it.
        """
        reply = await self._persist(lambda: self._step(response_text), response_text)
        self.responses.append(response_text)
        return reply

    async def ensure(self) -> EnvReply:
        """Start or replay the environment unless it is alive; returns its last reply. Raises as
        `step`."""
        return await self._persist(self._restore)

    async def suggest(self, player: str, seed: int) -> str:
        """Return the next response of the player `random` or `expert`; raises EnvironmentFault if
        it fails."""
        return await self._persist(lambda: self._suggest(player, seed))

    async def _persist(
        self, action: Callable[[], Awaitable[Result]], response_text: str | None = None
    ) -> Result:
        """Run `action`, which restores the episode first; after a fault, run it again.

        `response_text` is what a step responds. Raises as `step`.
        """
        failure = ""
        trace = ""
        for _ in range(self._pool.settings.max_env_retries_per_turn + 1):
            try:
                return await action()
            except ReplayError as error:
                failure = f"{failure}; {error}" if failure else str(error)
                trace = ""
                break
            except (ChildLostError, WorkerFault) as error:
                failure = str(error)
                trace = getattr(error, "trace", "")
                self._host = None
        raise EnvironmentFault(f"{failure}\n{trace}{self.describe(response_text)}")

    async def _step(self, response_text: str) -> EnvReply:
        await self._restore()
        # In the worker, `EnvHost.step` (workers/worker.py) calls the environment's `step`.
        reply = await self._call("step", response_text)
        self.digests.append(reply.digest)
        self._count_cut(reply)
        self.reply = reply
        return reply

    async def _suggest(self, player: str, seed: int) -> str:
        await self._restore()
        try:
            return await self._call("ask", suggest, player, seed)
        except WorkerFault as error:
            # The player's mistake: it would be made again.
            raise EnvironmentFault(
                f"the {player} player failed: {error}\n{self.describe()}"
            ) from error

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._host, answer = await self._worker.call(
            self._host, self._pool.settings.env_step_timeout_s, method, self._key, *arguments
        )
        return answer

    def _count_cut(self, reply: EnvReply) -> None:
        if reply.was_cut and not self.replayed:
            self._pool.faults["observation_cut"] += 1

    async def _restore(self) -> EnvReply:
        """The last reply, after a start or a replay if no host holds the episode."""
        if self._host is None or self.reply is None:
            return await self._rebuild()
        return self.reply

    async def _rebuild(self) -> EnvReply:
        settings = self._pool.settings
        if self.responses and self.reply is not None and not self.reply.deterministic:
            raise ReplayError(
                "the environment is not deterministic, so the episode cannot be replayed"
            )
        timeout_s = settings.env_reset_timeout_s + settings.env_step_timeout_s * len(self.responses)
        host, (reply, digests) = await self._worker.call(
            None, timeout_s, "start", self._key, self.spec, self.responses
        )
        if self.digests and digests != self.digests:
            self._pool.faults["replay_mismatch"] += 1
            step = next(
                (i for i, (a, b) in enumerate(zip(digests, self.digests, strict=False)) if a != b),
                0,
            )
            raise ReplayError(f"the replayed episode differs from the original at step {step}")
        if self.digests:
            self._pool.faults["replayed"] += 1
        else:
            self._count_cut(reply)
        self._host = host
        self.digests = digests
        self.reply = reply
        return reply

    def describe(self, response_text: str | None = None) -> str:
        """Everything needed to reproduce this episode: environment, task, seed, options and
        responses."""
        answers = [*self.responses, *([response_text] if response_text is not None else [])]
        return (
            f"to reproduce: environment {self.spec.env_path}, task "
            f"{self.spec.metadata.get('task')!r}, seed {self.spec.metadata.get('seed')}, options "
            f"{json.dumps(dict(self.spec.options), default=str)}, {len(answers)} answers: "
            f"{json.dumps(answers)[:20000]}"
        )

    async def close(self) -> None:
        """Close the environment, also one that was given up, unless it was lost with its worker."""
        if not self._open:
            return
        self._open = False
        self._worker.sessions -= 1
        host = self._worker.host
        if host is not None and not host.killed:
            try:
                await self._worker.call(
                    host, self._pool.settings.env_step_timeout_s, "close", self._key
                )
            except (ChildLostError, WorkerFault):
                self._pool.faults["close_failed"] += 1
