"""The ScienceWorld episode: commands, observations, rewards and the scripted player.

A command is valid if the game's parser understands it. Any other command changes nothing, and `look
around` is played instead. The reward is the change of the game's score, which goes from 0 to 1 and
drops to -1 when the task is failed. The simulator draws from a generator that a whole JVM shares,
so episodes never share one at the same time.
"""

import contextlib
import functools
import shutil
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError, check_known
from envs.loading import import_extra
from envs.text_game import CommandGame, Frame, GameSettings, first_line, list_commands

_KEPT = 4
"""Idle JVMs that a process keeps for later episodes."""

_lock = threading.Lock()
_idle: "list[World]" = []
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
            # The limit is ours, and the simulator's own wrapper would list all valid commands after
            # every step.
            self._env: Any = library.ScienceWorldEnv("", envStepLimit=10**9)
        except Exception as error:
            raise EnvironmentFault(
                f"ScienceWorld's Java process did not start ({type(error).__name__}: {error}); see "
                "what `java -version` prints, and whether there is memory for one more Java "
                "process"
            ) from error
        self.broken = False

    def load(self, task: str, variation: int, simplifications: str, gold: bool = False) -> str:
        """Start the task's variation; return its description."""
        try:
            self._call(self._env.load, task, variation, simplifications, generateGoldPath=gold)
        except ValueError as error:
            raise ConfigError(f"env.simplifications: {error}") from error
        return (
            self._call(self._env.server.getTaskDescription)
            .removeprefix("Task Description:")
            .strip()
        )

    def send(self, command: str) -> Moment:
        server = self._env.server
        text = self._call(server.step, command)
        return Moment(
            text.strip(),
            round(self._call(server.getScore), 2),
            bool(self._call(server.getCompleted)),
        )

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
        """Return the variations of a task in a split, the same in every world; loads a task unless
        they are known."""
        if (task, split) not in _variations:
            self._call(self._env.load, task, 0, "")
            _variations[task, split] = list(
                self._call(getattr(self._env, f"get_variations_{split}"))
            )
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
        """Call Java; if the JVM does not answer, raises EnvironmentFault and retires it."""
        try:
            return method(*arguments, **named)
        except ValueError:
            raise
        except Exception as error:
            self.broken = True
            raise EnvironmentFault(
                f"ScienceWorld's Java process failed: {type(error).__name__}: {error}"
            ) from error


def lease() -> World:
    """Return an idle world, or a new one."""
    with _lock:
        if _idle:
            return _idle.pop()
    return World()


def give_back(world: World) -> None:
    """Keep the world for a later episode, or end its JVM if it is broken or enough are kept."""
    with _lock:
        if not world.broken and len(_idle) < _KEPT:
            _idle.append(world)
            return
    world.close()


@functools.lru_cache(maxsize=256)
def solution(task: str, variation: int, simplifications: str) -> tuple[str, ...]:
    """Return the game's own solution, which a second world computes."""
    world = lease()
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
            "ScienceWorld needs Java 8 or newer; install it on every node that runs environments, "
            "on Debian with: apt-get install -y default-jre-headless"
        )
    return library


_MAX_CHARACTERS = 200
_UNKNOWN = "No known action matches"


class ScienceWorldSettings(GameSettings):
    """Settings of ScienceWorld."""

    no_pictures = "ScienceWorld has no pictures"

    split: Literal["train", "dev", "test"] = "train"
    """Part of a task's variations to play; the seed chooses one of them."""
    simplifications: str = ""
    """ScienceWorld's own simplifications, joined by commas, such as `openDoors,teleportAction`;
    `easy` for most."""
    admissible_commands: bool = False
    """List the commands that the game would accept with every observation: hundreds, and about 0.1
    s per turn."""


class ScienceWorld(CommandGame):
    """One ScienceWorld episode; it holds a JVM from `reset` to `close`."""

    settings: ScienceWorldSettings
    settings_model = ScienceWorldSettings
    template_path = Path(__file__).with_name("prompt.j2")
    default_action = "look around"
    deterministic = False  # up to ScienceWorld 1.2
    max_steps = 100

    def __init__(self, task: str, seed: int, settings: ScienceWorldSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        known = load_library().constants.ID2TASK
        self._name = known.get(task, task)  # a task is given by name or by number, such as 4-3
        names = list(known.values())
        check_known(
            self._name,
            names,
            f"ScienceWorld has no task {task!r}",
            f"there is {', '.join(names[:3])}, ...",
        )
        self._world: World | None = None

    def start(self) -> Frame:
        if self._world is None:
            self._world = lease()
        world = self._world
        variations = world.variations(self._name, self.settings.split)
        self._variation = variations[self.seed % len(variations)]
        self.mission = world.load(self._name, self._variation, self.settings.simplifications)
        self._score = 0.0
        self._history = list[str]()
        return self._frame(world.look())

    def try_command(self, command: str) -> Frame | None:
        assert self._world is not None  # `step` is refused before `reset`
        moment = self._world.send(command)
        if moment.text.startswith(_UNKNOWN):
            return None
        self._history.append(command)
        before = self._score
        self._score = moment.score
        return self._frame(moment.text, moment.score - before, moment.over or moment.score < 0)

    def translate(self, candidate: str) -> str | None:
        line = first_line(candidate).strip("\"'`*>. \t").removeprefix("[").removesuffix("]")
        return (
            line
            if line and len(line) <= _MAX_CHARACTERS and line.isascii() and line.isprintable()
            else None
        )

    def advice(self) -> str:
        """Return the next command of ScienceWorld's own solution, or `look around` once play has
        left it."""
        known = solution(self._name, self._variation, self.settings.simplifications)
        played = len(self._history)
        left = known[played:] if tuple(self._history) == known[:played] else ()
        return left[0] if left else self.default_action

    def close(self) -> None:
        self._running = False
        if self._world is not None:
            world = self._world
            self._world = None
            give_back(world)

    def _frame(self, text: str, reward: float = 0.0, over: bool = False) -> Frame:
        world = self._world
        assert world is not None
        look = world.look()
        shown = ["" if text == look else look, world.inventory()]
        if self.settings.admissible_commands and not over:
            shown.append(list_commands(world.commands()))
        return Frame(
            long_term=text,
            short_term="\n\n".join(filter(None, shown)),
            reward=reward,
            terminated=over,
            progression=min(max(self._score, 0.0), 1.0),
            metrics={"score": self._score, "failed": float(self._score < 0)},
        )


SETTINGS = ScienceWorldSettings
DEFAULT_TASK = "find-plant"
build_env = ScienceWorld.from_sample
expert_action = ScienceWorld.advice
