"""Tries environments in a worker process before anything expensive starts: build, reset and a first step.

Whatever goes wrong, also a hang or an exit, becomes one sentence with the file, the line and the fix.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError, EnvironmentFault, MissingDependencyError, SlimeVerlogError
from rollout.spec import EpisodeSpec, ObservationLimits
from rollout.turn import EnvReply
from rollout.workers.hosts import HostLostError, ProcessHost
from rollout.workers.reply import check_history
from rollout.workers.trial_worker import Abilities, Fault

BUDGET_S = 20.0
"""Once a trial has taken this long, further tasks of an environment that was already played are only built."""
MAX_CALL_S = 60.0
"""Limit of one call, unless the YAML sets `env_reset_timeout_s` or `env_step_timeout_s` itself."""
GRACE_S = 5.0
"""Seconds after the limit until a call that cannot be interrupted is given up with its process."""
ERRORS: dict[str, type[SlimeVerlogError]] = {kind.__name__: kind for kind in (ConfigError, MissingDependencyError)}
"""Classes of faults that are raised again as they are; all others become an `EnvironmentFault`."""

MAX_OUTPUT = 4000
"""Bytes of what environments print that are shown."""
PATIENCE_S = 1.0
"""Time in which threads may end after `close`."""
BEGINS_ANEW = (
    "the same task and seed begin with another observation; draw everything random from the seed, or set "
    "deterministic = False"
)


class TrialProcess(ProcessHost):
    """A worker process that explains faults. The start of what it prints goes to stderr, and the rest nowhere."""

    module = "rollout.workers.trial_worker"

    def __init__(self) -> None:
        ours, theirs = os.pipe()
        super().__init__(theirs)
        os.close(theirs)
        threading.Thread(target=_show, args=[ours], name="env-output", daemon=True).start()


def _show(file: int) -> None:
    """Copy up to `MAX_OUTPUT` bytes to stderr, and read on, so that the writer never waits."""
    left, told = MAX_OUTPUT, False
    with open(file, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            shown, left = data[:left], max(left - len(data), 0)
            if len(shown) < len(data) and not told:
                shown += f"\n(the environment prints more than {MAX_OUTPUT:,} bytes; the rest is not shown)\n".encode()
                told = True
            os.write(2, shown)


def try_environments(
    episodes: Sequence[EpisodeSpec],
    settings: RolloutSettings,
    budget_s: float = BUDGET_S,
    look: Callable[[EpisodeSpec, EnvReply], None] | None = None,
) -> list[str]:
    """Build every episode's environment, reset it and take a first step; raises SlimeVerlogError about the first fault.

    The first episode of each module is always reset and stepped. Until `budget_s` seconds have passed, it is also
    started a second time, and further episodes are tried. Returns notes about what could not be tried and about starts
    that differ or leave threads. `look` gets the first reply of each episode that is reset.
    """
    return asyncio.run(_try_all(episodes, settings, budget_s, look))


async def _try_all(
    episodes: Sequence[EpisodeSpec],
    settings: RolloutSettings,
    budget_s: float,
    look: Callable[[EpisodeSpec, EnvReply], None] | None,
) -> list[str]:
    began, known, notes = time.monotonic(), set[str](), list[str]()
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
                notes += (await trial.abilities(episode)).warnings
                try:
                    second = await trial.step(episode, await trial.suggest(episode, "random", 0))
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
    parts = (part for reply in replies for message in reply.messages for part in message.get("content") or ())
    if episode.env.options.get("vlm") and not any(isinstance(p, Mapping) and p.get("type") == "image" for p in parts):
        found = f"task {episode.name!r}: env.vlm is set, but {episode.env.env_path} shows no picture"
        raise ConfigError(f"{found}; give its frames an image, or leave env.vlm out")


async def start_again(trial: Trial, episode: EpisodeSpec) -> tuple[EnvReply, list[str]]:
    """Start a closed episode again and close it; return its first reply, and the threads that this left running."""
    before = await trial.threads(episode)
    await trial.build(episode)
    reply = await trial.reset(episode)
    await trial.close(episode)
    deadline = time.monotonic() + PATIENCE_S
    while len(after := await trial.threads(episode)) > len(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return reply, after[len(before) :]


def threads_left(names: Sequence[str]) -> str:
    """The sentence about threads that an episode leaves running."""
    return f"each episode leaves threads running ({', '.join(names[:3])}); end them in close"


class Trial:
    """One worker process that plays one episode per id; all methods but `end` raise `SlimeVerlogError`.

    It plays in the main thread, or in another thread where the YAML says `env_backend: inline`.
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
        """The next response of a scripted player."""
        return await self._call(episode, "suggest", player, seed)

    async def abilities(self, episode: EpisodeSpec) -> Abilities:
        return await self._call(episode, "abilities")

    async def tools(self, episode: EpisodeSpec) -> list[tuple[str, bool, str]]:
        """What the tools and the grader of a tool environment do, after a reset: names, whether it worked, details."""
        return await self._call(episode, "tools")

    async def draw(self, episode: EpisodeSpec) -> str:
        """What `render` draws; empty without it."""
        return await self._call(episode, "draw")

    async def threads(self, episode: EpisodeSpec) -> list[str]:
        """Names of the threads in the worker process."""
        return await self._call(episode, "threads")

    async def close(self, episode: EpisodeSpec) -> None:
        await self._call(episode, "close")

    def end(self) -> None:
        """End the process."""
        self._host.kill()

    async def _call(self, episode: EpisodeSpec, method: str, *arguments: Any) -> Any:
        key = "env_reset_timeout_s" if method in ("build", "reset") else "env_step_timeout_s"
        limit_s, path = getattr(self._settings, key), episode.env.env_path
        if key not in self._settings.model_fields_set:
            limit_s = min(limit_s, MAX_CALL_S)
        try:
            in_thread = self._settings.env_backend == "inline"
            call = self._host.call(method, limit_s, path, in_thread, episode.episode_id, *arguments)
            ok, result = await asyncio.wait_for(call, limit_s + GRACE_S)
        except HostLostError:
            cause = "os._exit, a crash of compiled code, or no memory left"
            said = f"{_named(path, method)} ended its process ({cause}); raise an error instead"
            ok, result = False, Fault("EnvironmentFault", said)
        except TimeoutError:
            self._host.kill()
            ok, result = False, Fault("TooSlow", f"{_named(path, method)} took longer than {limit_s:g} s")
        if ok:
            return result
        if isinstance(result, str):  # the reply could not be pickled
            result = Fault("EnvironmentFault", result)
        if result.kind in ERRORS:
            raise ERRORS[result.kind](result.sentence)
        slow = f"; end the loop there, or set {key} if it needs this long" if result.kind == "TooSlow" else ""
        kind = ServiceError if result.kind == "JudgeError" else EnvironmentFault
        raise kind(f"task {episode.name!r}: {result.sentence}{slow}")

    def _whole(self, episode: EpisodeSpec, method: str, reply: EnvReply) -> EnvReply:
        if not reply.was_cut:
            return reply
        raise EnvironmentFault(
            f"task {episode.name!r}: {_named(episode.env.env_path, method)} returned more than "
            f"max_observation_chars ({self._limits.chars:,} characters) or max_observation_images "
            f"({self._limits.images}) allow; shorten the observation there, or raise the limit"
        )


class ServiceError(EnvironmentFault):
    """A service that the environment asks does not answer; it may start later than the trial."""


def _named(path: str, method: str) -> str:
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
