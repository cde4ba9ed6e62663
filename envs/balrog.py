"""BALROG itself: any task of its six families, through its own `make_env`, in its own words.

The package is not on PyPI. Observations, instruction, legal actions, step limits and progression are all BALROG's;
only parsing, penalty and bookkeeping are those of every other game here.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import importlib.resources
import random
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import yaml

from envs.base import describe_task
from envs.command_game import MOST_CHARACTERS, clean_command
from envs.errors import ConfigError, MissingDependencyError
from envs.text_game import Frame, GameOptions, TextGame, read_game_options

INSTALL = "BALROG is not installed; get it with: pip install 'balrog @ git+https://github.com/balrog-ai/BALROG.git'"
PRESETS = {
    "verlog": {"binary_reward": False, "format_penalty": 0.1, "invalid_feedback": False},
    "balrog": {"binary_reward": False, "format_penalty": 0.0, "invalid_feedback": True},
}
# Crafter walks through sets of objects in the order of their addresses.
_NOT_REPEATABLE = frozenset({"crafter"})
# BabaIsAI prints Python objects when no YOU rule is left; where they lie in memory is nobody's business.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Where anything is a command, these would write files or ask the player back.
_REFUSED = frozenset({"save", "restore", "restart", "quit", "q", "script", "transcript", "unscript"})


# What joins two commands, or addresses one to somebody, in a parser of text adventures.
_JOINED = re.compile(r"[.,;]|\b(?:and|then)\b", re.IGNORECASE)


class _UnsupportedActionError(Exception):
    """The game refused an action that it lists as legal; nothing happened in it."""


@dataclass(frozen=True, kw_only=True)
class BalrogOptions(GameOptions):
    """`config` is laid over the package's own config.yaml, for example {envs: {nle_kwargs: {character: mon}}}.

    `invalid_feedback` puts BALROG's remark about an invalid answer before the next observation. BALROG's TextWorld
    reports the score so far as the reward of every step; the preset `verlog` pays what it changed by.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    invalid_feedback: bool = True


def build_env(sample: Any, args: Any) -> Balrog:
    """Make the environment of `sample.metadata`'s task (`family/task`) and seed with the options in `args.env`.

    Raises:
        MissingDependencyError: BALROG, or a package that this family needs, is not installed.
        ConfigError: unknown task (with the nearest names) or option.
    """
    task, seed = describe_task(sample)
    return Balrog(task, seed, read_game_options(BalrogOptions, args, PRESETS))


class Balrog(TextGame):
    """One episode of one of BALROG's tasks; `actions` is empty where any text is one (TextWorld)."""

    def __init__(self, task: str, seed: int, options: BalrogOptions) -> None:
        super().__init__(options)
        self.options: BalrogOptions = options
        self.task, self.seed = task, seed
        self._make_env = _import("balrog.environments").make_env
        self._config = _Config.of(_merge(_read_config(), options.config))
        self.family, self._name = find_task(task, self._config["tasks"])
        self.deterministic = self.family not in _NOT_REPEATABLE
        self._place_seed()
        self._random = _Randomness(seed)
        self._env: Any = None
        self._steps = 0

    def start(self) -> Frame:
        self._close_env()
        # A second reset of the same object may give another world (Crafter counts them), so it is made anew.
        self._random = _Randomness(self.seed)
        with self._random.in_place():
            self._env = self._make()
            observation, _ = self._env.reset(seed=self.seed)
        space = _find(self._env, "language_action_space")
        self.actions = tuple(space) if hasattr(space, "__iter__") else ()
        self.default_action = str(_find(self._env, "default_action"))
        self.max_steps, self._steps, self._paid = self.options.max_steps or int(self._env.max_steps), 0, 0.0
        self.mission = str(observation.get("mission") or "")
        return self._frame(observation)

    def play(self, action: str) -> Frame:
        with self._random.in_place():
            try:
                observation, reward, terminated, truncated, _ = self._env.step(action)
            except ValueError as error:
                # NetHack's list holds all two-digit numbers, most of which the game then refuses.
                if "not recognized or not supported" in str(error):
                    raise _UnsupportedActionError(action) from error
                raise
        self._steps += 1
        late = self._steps >= self.max_steps and not terminated
        if self.family == "textworld" and self.options.preset == "verlog":
            reward, self._paid = reward - self._paid, reward
        return self._frame(
            observation, reward=float(reward), terminated=bool(terminated), truncated=bool(truncated) or late
        )

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        action = self.translate(candidate)
        if action is not None:
            with contextlib.suppress(_UnsupportedActionError):
                return action, self.play(action)
        frame = self.play(self.default_action)
        if self.options.invalid_feedback:
            remark = "\n\nYour previous output did not contain a valid action. Defaulted to action: "
            frame = replace(frame, long_term=f"{remark}{self.default_action}\n\nObservation:\n{frame.long_term}")
        return None, frame

    def translate(self, candidate: str) -> str | None:
        if not self.actions:
            return _free_command(candidate)
        if candidate in self.actions:
            return candidate
        folded = [action for action in self.actions if action.lower() == candidate.lower()]
        return folded[0] if len(folded) == 1 else None

    def render_prompt(self) -> str:
        if self.options.prompt_template:
            return super().render_prompt()
        return self._env.get_instruction_prompt(instructions=self.mission or None).strip()

    def _frame(self, observation: Mapping[str, Any], **outcome: Any) -> Frame:
        text = observation["text"]
        return Frame(
            long_term=_ADDRESS.sub("", text["long_term_context"]),
            short_term=text["short_term_context"],
            image=observation["image"] if self.options.vlm else None,
            progression=float(self._env.get_stats().get("progression", 0.0)),
            **outcome,
        )

    def _place_seed(self) -> None:
        # TextWorld takes the seed to choose a game, Crafter to make its world; the others take reset's.
        self._config["envs"]["env_kwargs"]["seed"] = self.seed
        self._config["envs"].setdefault("crafter_kwargs", _Config())["seed"] = self.seed
        self._config["agent"]["max_image_history"] = int(self.options.vlm)

    def _make(self) -> Any:
        try:
            return self._make_env(self.family, self._name, self._config)
        except Exception as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: Exception) -> ConfigError | MissingDependencyError | None:
        """Return what to tell the user about an environment that could not be made; None for anything unforeseen."""
        task = f"{self.family}/{self._name}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            return MissingDependencyError(
                f"BALROG's {self.family} needs the package {error.name}, which BALROG's own install brings; {INSTALL}"
            )
        if isinstance(error, ModuleNotFoundError):
            # MiniHack says so of Boxoban's maps, which are no module.
            return MissingDependencyError(f"BALROG cannot make {task}: {error}")
        if "raqm" in str(error):
            return MissingDependencyError(
                f"BALROG's {self.family} draws text in a way that the installed Pillow refuses ({error}); "
                "get an older one with: pip install 'pillow<13'"
            )
        if any(cls.__module__ == "gym.error" for cls in type(error).__mro__):
            listed = ", ".join(self._config["tasks"].get(f"{self.family}_tasks", ()))
            return ConfigError(f"BALROG cannot make {task}: {error}; BALROG's own list has {listed}")
        if isinstance(error, (ValueError, LookupError, UnboundLocalError)):
            hint = "; its games are a download: balrog-post-install" if self.family == "textworld" else ""
            return ConfigError(f"BALROG cannot make {task}: {type(error).__name__}: {error}{hint}")
        return None

    def close(self) -> None:
        self._close_env()
        self._running = False

    def _close_env(self) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            env.close()


def _free_command(candidate: str) -> str | None:
    """Return the text as the one command that BALROG would pass on, whether or not the game understands it.

    None for what this adapter keeps from the interpreter: nothing at all, control characters, too many characters,
    several commands in one, and words that write files or ask the player back.
    """
    command = clean_command(candidate)
    if command is not None:
        return None if command.split()[0].lower() in _REFUSED else command
    line = " ".join(candidate.strip().splitlines()[:1])
    if not line or len(line) > MOST_CHARACTERS or not (line.isascii() and line.isprintable()):
        return None
    words = re.findall(r"[a-z0-9]+", line.lower())
    return None if words and (_JOINED.search(line) or _REFUSED & set(words)) else line


def find_task(task: str, listed: Mapping[str, Any]) -> tuple[str, str]:
    """Split `family/task`; a task that BALROG lists, or the family of a single one, needs no more than its name.

    Raises:
        ConfigError: neither; the nearest names are listed.
    """
    families = {key.removesuffix("_tasks"): list(tasks) for key, tasks in listed.items()}
    family, _, rest = task.partition("/")
    if family in families and rest:
        return family, rest
    if len(families.get(task, ())) == 1:
        return task, families[task][0]
    owners = [name for name, tasks in families.items() if task in tasks]
    if len(owners) == 1:
        return owners[0], task
    names = [f"{name}/{known}" for name, tasks in families.items() for known in tasks]
    near = [name for name in names if task and task in name][:3] or difflib.get_close_matches(task, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"write FAMILY/TASK, with one of {', '.join(families)}"
    raise ConfigError(f"BALROG has no task {task!r}; {hint}")


class _Config(dict):
    """A mapping whose keys are attributes as well, which is all that BALROG asks of its configuration."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(key) from error

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls({key: cls.of(inner) for key, inner in value.items()}) if isinstance(value, Mapping) else value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def _read_config() -> dict[str, Any]:
    path = importlib.resources.files("balrog") / "config" / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "balrog":
            raise MissingDependencyError(INSTALL) from error
        raise MissingDependencyError(f"BALROG needs the package {error.name}, which its own install brings") from error


def _find(env: Any, name: str) -> Any:
    """The attribute of the outermost wrapper that has it; gymnasium's wrappers stopped passing attributes on."""
    while env is not None:
        if hasattr(env, name):
            return getattr(env, name)
        env = getattr(env, "env", None)
    raise ConfigError(f"this version of BALROG has no {name} on its environments; use the one named in the docs")


class _Randomness:
    """The process-wide generators as one environment left them: several of its kind live in one process."""

    _lock = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Work with this environment's states, then put the process's own back."""
        with self._lock:
            outside = (random.getstate(), np.random.get_state())
            self._set(self._states)
            try:
                yield
            finally:
                self._states = (random.getstate(), np.random.get_state())
                self._set(outside)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
