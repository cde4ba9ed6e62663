"""Java processes with ScienceWorld's simulator: started when needed, reused by later episodes, bounded in number.

The simulator draws from a generator that a whole JVM shares, so episodes never share one at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import shutil
import threading
from types import ModuleType
from typing import Any, NamedTuple

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.loading import import_extra

_KEPT = 4
"""Idle JVMs that a process keeps for later episodes."""

_lock = threading.Lock()
_idle: list[World] = []
_running = 0
_variations: dict[tuple[str, str], list[int]] = {}


class Moment(NamedTuple):
    """What the game answered to a command."""

    text: str
    score: float
    """From 0 to 1, or negative if the task is failed."""
    over: bool


class World:
    """One JVM with one simulator; raises EnvironmentFault if it does not start."""

    def __init__(self) -> None:
        library = load_library()
        try:
            # The limit is ours, and the simulator's own wrapper would list all valid commands after every step.
            self._env: Any = library.ScienceWorldEnv("", envStepLimit=10**9)
        except Exception as error:
            raise EnvironmentFault(
                f"ScienceWorld's Java process did not start ({type(error).__name__}: {error}); see what "
                "`java -version` prints, and whether there is memory for one more Java process"
            ) from error
        self.broken = False

    def load(self, task: str, variation: int, simplifications: str, gold: bool = False) -> str:
        """Start the task's variation; return its description."""
        try:
            self._call(self._env.load, task, variation, simplifications, generateGoldPath=gold)
        except ValueError as error:
            raise ConfigError(f"env.simplifications: {error}") from error
        return self._call(self._env.server.getTaskDescription).removeprefix("Task Description:").strip()

    def send(self, command: str) -> Moment:
        server = self._env.server
        text = self._call(server.step, command)
        return Moment(text.strip(), round(self._call(server.getScore), 2), bool(self._call(server.getCompleted)))

    def look(self) -> str:
        return self._call(self._env.server.freeActionLook).strip()

    def inventory(self) -> str:
        return self._call(self._env.server.freeActionInventory).strip()

    def commands(self) -> list[str]:
        """Return all commands that the game would accept now."""
        return sorted(self._call(self._env.get_valid_action_object_combinations))

    def gold(self) -> tuple[str, ...]:
        """Return the game's own solution of what was loaded with `gold`."""
        return tuple(self._call(self._env.get_gold_action_sequence))

    def variations(self, task: str, split: str) -> list[int]:
        """Return the variations of a task in a split, the same in every world; loads a task unless they are known."""
        if (task, split) not in _variations:
            self._call(self._env.load, task, 0, "")
            _variations[task, split] = list(self._call(getattr(self._env, f"get_variations_{split}")))
        return _variations[task, split]

    def close(self) -> None:
        """End the JVM, whatever state it is in."""
        from py4j.protocol import Py4JError

        process = self._env._gateway.java_process
        with contextlib.suppress(OSError, Py4JError):  # of a JVM that is dead already
            self._env.close()
        process.kill()
        process.wait()

    def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Call Java; raises EnvironmentFault if the JVM does not answer, which is then not used again."""
        try:
            return method(*arguments, **named)
        except ValueError:
            raise
        except Exception as error:
            self.broken = True
            raise EnvironmentFault(f"ScienceWorld's Java process failed: {type(error).__name__}: {error}") from error


def lease(most: int) -> World:
    """Return an idle world, or a new one; raises ConfigError if this process has `most` of them in use already."""
    global _running
    with _lock:
        if _idle:
            return _idle.pop()
        if _running >= most:
            raise ConfigError(
                f"this process plays {_running} ScienceWorld episodes, each with a Java process, and env.most_jvms "
                "allows no more; lower n_env, raise env_workers, or raise env.most_jvms if the memory suffices"
            )
        _running += 1
    try:
        return World()
    except BaseException:
        _ended()
        raise


def give_back(world: World) -> None:
    """Keep the world for a later episode, or end its JVM if it is broken or enough are kept."""
    with _lock:
        if not world.broken and len(_idle) < _KEPT:
            _idle.append(world)
            return
    _ended()
    world.close()


def _ended() -> None:
    global _running
    with _lock:
        _running -= 1


@functools.lru_cache(maxsize=256)
def solution(task: str, variation: int, simplifications: str, most: int) -> tuple[str, ...]:
    """Return the game's own solution, which a second world computes."""
    world = lease(most)
    try:
        world.load(task, variation, simplifications, gold=True)
        return world.gold()
    finally:
        give_back(world)


@functools.cache
def load_library() -> ModuleType:
    """Import the package scienceworld; raises MissingDependencyError without it or without Java."""
    library = import_extra("scienceworld", "ScienceWorld", "scienceworld")
    if shutil.which("java") is None:
        raise MissingDependencyError(
            "ScienceWorld needs Java 8 or newer; install it on every node that runs environments, on Debian with: "
            "apt-get install -y default-jre-headless"
        )
    return library


def is_deterministic() -> bool:
    """Return whether a seed and commands decide an episode: ScienceWorld says so from its version 1.3 on."""
    load_library()
    major, minor = importlib.metadata.version("scienceworld").split(".")[:2]
    return (int(major), int(minor)) >= (1, 3)
