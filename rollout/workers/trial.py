"""Tries environments in a worker process before anything expensive starts: build, reset and a first
step.

Whatever goes wrong, also a hang or an exit, becomes one sentence with the file, the line and the
fix.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.errors import (
    ConfigError,
    EnvironmentFault,
    MissingDependencyError,
    SlimeVerlogError,
    WorkerFault,
)
from rollout.spec import EpisodeSpec, ObservationLimits
from rollout.turn import EnvReply
from rollout.workers.abilities import abilities, suggest, threads
from rollout.workers.child import ChildLostError
from rollout.workers.hosts import ProcessHost
from rollout.workers.pool import TooSlowError, Worker
from rollout.workers.reply import check_history
from rollout.workers.utilization import Utilization

BUDGET_S = 20.0
"""Once a trial has taken this long, further tasks of an environment that was already played are
only built."""
MAX_CALL_S = 60.0
"""Limit of one call, unless the YAML sets `env_reset_timeout_s` or `env_step_timeout_s` itself."""
GRACE_S = 5.0
"""Seconds after the limit until a call that cannot be interrupted is given up with its process."""
ERRORS: dict[str, type[SlimeVerlogError]] = {
    kind.__name__: kind for kind in (ConfigError, MissingDependencyError)
}
"""Classes of faults that are raised again as they are; all others become an `EnvironmentFault`."""
PATIENCE_S = 1.0
"""Time in which threads may end after `close`."""
BEGINS_ANEW = (
    "the same task and seed begin with another observation; draw everything random from the seed, "
    "or set deterministic = False"
)


async def try_environments(
    episodes: Sequence[EpisodeSpec],
    settings: RolloutSettings,
    budget_s: float = BUDGET_S,
    look: Callable[[EpisodeSpec, EnvReply], None] | None = None,
) -> list[str]:
    """Build every episode's environment, reset it and take a first step; raises SlimeVerlogError
    about the first fault.

    The first episode of each module is always reset and stepped. Until `budget_s` seconds have
    passed, it is also started a second time, and further episodes are tried. Returns notes about
    what could not be tried and about starts that differ or leave threads. `look` gets the first
    reply of each episode that is reset.
    """
    began = time.monotonic()
    known = set[str]()
    notes = list[str]()
    trial = Trial(settings)
    try:
        for episode in episodes:
            await trial.build(episode)
            is_new = episode.env.env_path not in known
            if is_new or time.monotonic() - began < budget_s:
                known.add(episode.env.env_path)
                first = await trial.reset(episode)
                if look is not None:
                    look(episode, first)
                notes += (await trial.ask(episode, abilities)).warnings
                try:
                    second = await trial.step(
                        episode, await trial.ask(episode, suggest, "random", 0)
                    )
                    check_pictures(episode, [first, second])
                except ServiceError as error:
                    notes.append(str(error))
                await trial.close(episode)
                if is_new and time.monotonic() - began < budget_s:
                    again, left = await start_again(trial, episode)
                    if first.deterministic and again.digest != first.digest:
                        notes.append(f"task {episode.name!r}: {BEGINS_ANEW}")
                    notes += [f"task {episode.name!r}: {threads_left(left)}"] * bool(left)
            await trial.close(episode)
    finally:
        trial.end()
    return list(dict.fromkeys(notes))


def check_pictures(episode: EpisodeSpec, replies: Sequence[EnvReply]) -> None:
    """Raise ConfigError if `env.vlm` is set and no reply shows a picture."""
    parts = (
        part
        for reply in replies
        for message in reply.messages
        for part in message.get("content") or ()
    )
    if episode.env.options.get("vlm") and not any(
        isinstance(p, Mapping) and p.get("type") == "image" for p in parts
    ):
        found = (
            f"task {episode.name!r}: env.vlm is set, but {episode.env.env_path} shows no picture"
        )
        raise ConfigError(f"{found}; give its frames an image, or leave env.vlm out")


async def start_again(trial: Trial, episode: EpisodeSpec) -> tuple[EnvReply, list[str]]:
    """Start a closed episode again and close it; return its first reply, and the threads that this
    left running."""
    before = await trial.ask(episode, threads)
    await trial.build(episode)
    reply = await trial.reset(episode)
    await trial.close(episode)
    deadline = time.monotonic() + PATIENCE_S
    while (
        len(after := await trial.ask(episode, threads)) > len(before)
        and time.monotonic() < deadline
    ):
        await asyncio.sleep(0.02)
    return reply, after[len(before) :]


def threads_left(names: Sequence[str]) -> str:
    """The sentence about threads that an episode leaves running."""
    return f"each episode leaves threads running ({', '.join(names[:3])}); end them in close"


class Trial:
    """One worker process that plays one episode per id; all methods but `end` raise
    `SlimeVerlogError`.

    It plays in the main thread, or in another thread where the YAML says `env_backend: inline`.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        self._in_thread = settings.env_backend == "inline"
        entry = (
            "rollout.workers.worker:main_in_thread"
            if self._in_thread
            else "rollout.workers.worker:main"
        )
        self._worker = Worker(lambda: ProcessHost(entry), Counter(), Utilization())
        self._settings = settings
        self._limits = ObservationLimits(
            settings.max_observation_chars, settings.max_observation_images
        )

    async def build(self, episode: EpisodeSpec) -> None:
        await self._call(episode, "build", replace(episode.env, limits=self._limits))

    async def reset(self, episode: EpisodeSpec) -> EnvReply:
        reply = self._whole(episode, "reset", await self._call(episode, "reset"))
        check_history(reply, self._settings.history)
        return reply

    async def step(self, episode: EpisodeSpec, answer: str) -> EnvReply:
        return self._whole(episode, "step", await self._call(episode, "step", answer))

    async def ask(self, episode: EpisodeSpec, function: Callable[..., Any], *arguments: Any) -> Any:
        """Ask one of the questions of `rollout/workers/abilities.py`."""
        return await self._call(episode, "ask", function, *arguments)

    async def close(self, episode: EpisodeSpec) -> None:
        await self._call(episode, "close")

    def end(self) -> None:
        """End the process."""
        self._worker.kill()

    async def _call(self, episode: EpisodeSpec, method: str, *arguments: Any) -> Any:
        key = "env_reset_timeout_s" if method in ("build", "reset") else "env_step_timeout_s"
        limit_s = getattr(self._settings, key)
        if key not in self._settings.model_fields_set:
            limit_s = min(limit_s, MAX_CALL_S)
        command: tuple[Any, ...] = (method, episode.episode_id, *arguments)
        if not self._in_thread:
            command = ("timed", limit_s, *command)
        name = arguments[0].__name__ if method == "ask" else method
        kind = EnvironmentFault
        advice = f"end the loop there, or set {key} if it needs this long"
        try:
            return (await self._worker.call(None, limit_s + GRACE_S, *command))[1]
        except TooSlowError:
            sentence = f"{_named(episode, name)} took longer than {limit_s:g} s; {advice}"
        except ChildLostError:
            cause = "os._exit, a crash of compiled code, or no memory left"
            sentence = (
                f"{_named(episode, name)} ended its process ({cause}); raise an error instead"
            )
        except WorkerFault as fault:
            if fault.kind in ERRORS:
                raise ERRORS[fault.kind](str(fault)) from fault
            sentence = str(fault)
            if fault.kind == "TooSlow":
                sentence += f" after {limit_s:g} s; {advice}"
            if fault.kind == "JudgeError":
                kind = ServiceError
        raise kind(f"task {episode.name!r}: {sentence}")

    def _whole(self, episode: EpisodeSpec, method: str, reply: EnvReply) -> EnvReply:
        if not reply.was_cut:
            return reply
        raise EnvironmentFault(
            f"task {episode.name!r}: {_named(episode, method)} returned more than "
            f"max_observation_chars ({self._limits.chars:,} characters) or max_observation_images "
            f"({self._limits.images}) allow; shorten the observation there, or raise the limit"
        )


class ServiceError(EnvironmentFault):
    """A service that the environment asks does not answer; it may start later than the trial."""


def _named(episode: EpisodeSpec, method: str) -> str:
    path = episode.env.env_path
    if method == "build":
        return f"importing the file or calling build_env ({_place(path, 'build_env')})"
    return f"{method} ({_place(path, method)})"


def _place(path: str, name: str) -> str:
    """`FILE:LINE` of the function called `name`, or the file alone; the file is read, not
    imported."""
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
