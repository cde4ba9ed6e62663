"""Tries environments in a worker process before anything expensive starts: build, reset and a first step.

Whatever goes wrong becomes one sentence with the file, the line and the fix. This includes an environment that hangs
or ends its process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError, EnvironmentFault, MissingDependencyError, SlimeVerlogError
from rollout.spec import EpisodeSpec
from rollout.workers.hosts import HostLostError, ProcessHost
from rollout.workers.observation_limits import ObservationLimits
from rollout.workers.reply import EnvReply, check_history
from rollout.workers.trial_worker import Abilities, Fault

BUDGET_S = 20.0
"""Once a trial has taken this long, further tasks of an environment that was already played are only built."""
LONGEST_CALL_S = 60.0
"""Limit of one call, unless the YAML sets `env_reset_timeout_s` or `env_step_timeout_s` itself."""
GRACE_S = 5.0
"""Seconds after the limit until a call that cannot be interrupted is given up with its process."""
ERRORS: dict[str, type[SlimeVerlogError]] = {
    "ConfigError": ConfigError,
    "MissingDependencyError": MissingDependencyError,
}
"""Classes of faults that are raised again as they are; all others become an `EnvironmentFault`."""


class TrialProcess(ProcessHost):
    """A worker process that explains faults."""

    module = "rollout.workers.trial_worker"


def try_environments(
    episodes: Sequence[EpisodeSpec], settings: RolloutSettings, budget_s: float = BUDGET_S
) -> list[str]:
    """Build every episode's environment, reset it and take a first step, as far as the budget allows.

    The first episode of each environment module is always reset and stepped, further ones until `budget_s` seconds
    have passed. Returns notes about what could not be tried, such as a judge whose server does not answer yet.

    Raises:
        SlimeVerlogError: about the first fault; one sentence.
    """
    return asyncio.run(_try_all(episodes, settings, budget_s))


async def _try_all(episodes: Sequence[EpisodeSpec], settings: RolloutSettings, budget_s: float) -> list[str]:
    began, known, notes = time.monotonic(), set[str](), list[str]()
    trial = Trial(settings)
    try:
        for episode in episodes:
            await trial.build(episode)
            if episode.env.env_path not in known or time.monotonic() - began < budget_s:
                known.add(episode.env.env_path)
                await trial.reset(episode)
                await trial.abilities(episode)
                try:
                    await trial.step(episode, await trial.suggest(episode, "random", 0))
                except ServiceError as error:
                    notes.append(str(error))
            await trial.close(episode)
    finally:
        trial.end()
    return list(dict.fromkeys(notes))


class Trial:
    """One worker process that plays one episode at a time and explains every fault in one sentence.

    All methods but `end` raise `SlimeVerlogError`.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        self._host = TrialProcess()
        self._settings = settings
        self._limits = ObservationLimits(settings.max_observation_chars, settings.max_observation_images)

    async def build(self, episode: EpisodeSpec) -> None:
        await self._call(episode, "build", replace(episode.env, limits=self._limits))

    async def reset(self, episode: EpisodeSpec) -> EnvReply:
        reply = self._whole(episode, "reset", await self._call(episode, "reset"))
        check_history(reply, self._settings.history)
        return reply

    async def step(self, episode: EpisodeSpec, answer: str) -> EnvReply:
        return self._whole(episode, "step", await self._call(episode, "step", answer))

    async def suggest(self, episode: EpisodeSpec, player: str, seed: int) -> str:
        """The next answer of a scripted player."""
        return await self._call(episode, "suggest", player, seed)

    async def abilities(self, episode: EpisodeSpec) -> Abilities:
        return await self._call(episode, "abilities")

    async def close(self, episode: EpisodeSpec) -> None:
        await self._call(episode, "close")

    def end(self) -> None:
        """End the process."""
        self._host.kill()

    async def _call(self, episode: EpisodeSpec, method: str, *arguments: Any) -> Any:
        key = "env_reset_timeout_s" if method in ("build", "reset") else "env_step_timeout_s"
        limit_s, path = getattr(self._settings, key), episode.env.env_path
        if key not in self._settings.model_fields_set:
            limit_s = min(limit_s, LONGEST_CALL_S)
        try:
            call = self._host.call(method, limit_s, path, 0, *arguments)
            ok, result = await asyncio.wait_for(call, limit_s + GRACE_S)
        except HostLostError:
            ok, result = False, Fault("EnvironmentFault", _ended(path, method))
        except TimeoutError:
            self._host.kill()
            ok, result = False, Fault("TooSlow", f"{_named(path, method)} took longer than {limit_s:g} s")
        if ok:
            return result
        if isinstance(result, str):  # the reply could not be pickled
            result = Fault("EnvironmentFault", result)
        raise _error_of(result, f"task {episode.name!r}: ", key)

    def _whole(self, episode: EpisodeSpec, method: str, reply: EnvReply) -> EnvReply:
        if not reply.was_cut:
            return reply
        raise EnvironmentFault(
            f"task {episode.name!r}: {_named(episode.env.env_path, method)} returned more than "
            f"max_observation_chars ({self._limits.chars:,} characters) or max_observation_images "
            f"({self._limits.images}) allow; shorten the observation there, or raise the limit"
        )


def _error_of(fault: Fault, words: str, key: str) -> SlimeVerlogError:
    if fault.kind in ERRORS:
        return ERRORS[fault.kind](fault.sentence)
    if fault.kind == "TooSlow":
        return EnvironmentFault(f"{words}{fault.sentence}; end the loop there, or set {key} if it needs this long")
    return (ServiceError if fault.kind == "JudgeError" else EnvironmentFault)(f"{words}{fault.sentence}")


class ServiceError(EnvironmentFault):
    """A service that the environment asks does not answer; it may start later than the trial."""


def _ended(path: str, method: str) -> str:
    return (
        f"{_named(path, method)} ended its process (os._exit, a crash of compiled code, or no memory left); "
        "raise an error instead"
    )


def _named(path: str, method: str) -> str:
    """The method, with the place where the environment's file defines it."""
    if method == "build":
        return f"importing the file or calling build_env ({_place(path, 'build_env')})"
    return f"{method} ({_place(path, method)})"


def _place(path: str, name: str) -> str:
    """`FILE:LINE` of the function called `name`, or the file alone; the file is read, not imported."""
    file = path
    if not path.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(path)
            file = spec.origin if spec is not None and spec.origin is not None else path
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return f"{file}:{node.lineno}"
    return file
