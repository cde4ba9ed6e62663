"""Adapter to the BALROG package: any task of its six families, made by its own `make_env`.

The package is not on PyPI. Observations, instruction, legal actions, step limits and progression
come from BALROG; parsing, penalty and bookkeeping are the same as in all games here.
"""

import contextlib
import importlib
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from envs.errors import ConfigError, MissingDependencyError, did_you_mean
from envs.randomness import OwnRandomness
from envs.text_game import MAX_CHARACTERS, Frame, GameSettings, TextGame, first_line
from slime_verlog import Field, merge

INSTALL = "BALROG is not installed; get it with: pip install 'balrog @ git+https://github.com/balrog-ai/BALROG.git'"
# Crafter iterates over sets of objects, whose order depends on memory addresses.
_NOT_DETERMINISTIC = frozenset({"crafter"})
# BabaIsAI prints Python objects when no YOU rule is left; their addresses differ between runs.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Commands to the interpreter that would write files or ask a question.
_REFUSED = frozenset(
    {"save", "restore", "restart", "quit", "q", "script", "transcript", "unscript"}
)
# Marks of several commands in one, or of a command to somebody else, in text adventures.
_JOINED = re.compile(r"[.,;]|\b(?:and|then)\b", re.IGNORECASE)


class _UnsupportedActionError(Exception):
    """The game refused an action that it lists as legal; its state did not change."""


class BalrogSettings(GameSettings):
    """Settings of BALROG's own environments."""

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Changes to BALROG's own config.yaml, for example {envs: {nle_kwargs: {character: mon}}}."""


class Balrog(TextGame):
    """One episode of a BALROG task; `actions` is empty if any text is an action (TextWorld)."""

    settings: BalrogSettings
    settings_model = BalrogSettings

    def __init__(self, task: str, seed: int, settings: BalrogSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        try:
            self._make_env = importlib.import_module("balrog.environments").make_env
        except ModuleNotFoundError as error:
            lacking = (
                ""
                if (error.name or "").startswith("balrog")
                else f"BALROG needs the package {error.name}; "
            )
            raise MissingDependencyError(f"{lacking}{INSTALL}") from error
        defaults = yaml.safe_load(
            (importlib.resources.files("balrog") / "config" / "config.yaml").read_text("utf-8")
        )
        self._config = _Config.of(merge(defaults, settings.config))
        self.family, self._name = find_task(task, self._config["tasks"])
        self.deterministic = self.family not in _NOT_DETERMINISTIC
        # TextWorld and Crafter read the seed from the configuration, the others from `reset`.
        self._config["envs"]["env_kwargs"]["seed"] = seed
        self._config["envs"].setdefault("crafter_kwargs", _Config())["seed"] = seed
        self._config["agent"]["max_image_history"] = int(bool(settings.vlm))
        self._env: Any = None

    def start(self) -> Frame:
        self._close_env()
        # A new object per episode: Crafter counts the resets of one object and draws another world
        # each time.
        self._random = OwnRandomness(self.seed)
        with self._random.in_place():
            try:
                self._env = self._make_env(self.family, self._name, self._config)
            except OSError:
                raise
            except Exception as error:  # each game raises others
                raise self._explained(error) from error
            observation, _ = self._env.reset(seed=self.seed)
        space = _find(self._env, "language_action_space")
        self.actions = tuple(space) if hasattr(space, "__iter__") else ()
        self.default_action = str(_find(self._env, "default_action"))
        self.max_steps = self.settings.max_steps or int(self._env.max_steps)
        self._paid = 0.0
        self.mission = str(observation.get("mission") or "")
        return self._frame(observation)

    def play(self, action: str) -> Frame:
        with self._random.in_place():
            try:
                observation, reward, terminated, truncated, _ = self._env.step(action)
            except ValueError as error:
                # NetHack lists all two-digit numbers as actions, but refuses most of them.
                if "not recognized or not supported" in str(error):
                    raise _UnsupportedActionError(action) from error
                raise
        # BALROG's TextWorld reports the score so far as the reward of every step; `verlog` pays the
        # difference.
        if self.family == "textworld" and self.settings.preset == "verlog":
            reward, self._paid = reward - self._paid, reward
        return self._frame(
            observation,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        action = self.translate(candidate)
        if action is not None:
            with contextlib.suppress(_UnsupportedActionError):
                return action, self.play(action)
        frame = self.play(self.default_action)
        if self.settings.preset == "balrog":
            remark = (
                "\n\nYour previous output did not contain a valid action. Defaulted to action: "
            )
            frame = replace(
                frame, long_term=f"{remark}{self.default_action}\n\nObservation:\n{frame.long_term}"
            )
        return None, frame

    def translate(self, candidate: str) -> str | None:
        if not self.actions:
            return _free_command(candidate)
        if candidate in self.actions:
            return candidate
        folded = [action for action in self.actions if action.lower() == candidate.lower()]
        return folded[0] if len(folded) == 1 else None

    def render_prompt(self) -> str:
        if self.settings.prompt_template:
            return super().render_prompt()
        return self._env.get_instruction_prompt(instructions=self.mission or None).strip()

    def _frame(self, observation: Mapping[str, Any], **outcome: Any) -> Frame:
        text = observation["text"]
        return Frame(
            long_term=_ADDRESS.sub("", text["long_term_context"]),
            short_term=text["short_term_context"],
            image=observation["image"] if self.settings.vlm else None,
            progression=float(self._env.get_stats().get("progression", 0.0)),
            **outcome,
        )

    def _explained(self, error: Exception) -> ConfigError | MissingDependencyError:
        """Explain to the user why an environment could not be made."""
        wrong = f"BALROG cannot make {self.family}/{self._name}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            # MiniHack raises this also for the missing maps of Boxoban.
            return MissingDependencyError(f"{wrong}; {INSTALL}")
        if "raqm" in str(error):
            return MissingDependencyError(
                f"{wrong}; install an older Pillow with: pip install 'pillow<13'"
            )
        hint = (
            "; download its games with: balrog-post-install" if self.family == "textworld" else ""
        )
        tasks = ", ".join(self._config["tasks"][f"{self.family}_tasks"])
        return ConfigError(f"{wrong}{hint}; its tasks are {tasks}")

    def close(self) -> None:
        self._close_env()
        self._running = False

    def _close_env(self) -> None:
        if self._env is not None:
            env = self._env
            self._env = None
            env.close()


SETTINGS = BalrogSettings
build_env = Balrog.from_sample


def _free_command(candidate: str) -> str | None:
    """Return the text as BALROG would pass it; None for several commands, and for those that write
    files or ask."""
    line = " ".join(first_line(candidate).strip("\"'`*>. \t").split())
    if not line or len(line) > MAX_CHARACTERS or not (line.isascii() and line.isprintable()):
        return None
    words = re.findall(r"[a-z0-9]+", line.lower())
    return None if _JOINED.search(line) or _REFUSED & set(words) else line


def find_task(task: str, listed: Mapping[str, Any]) -> tuple[str, str]:
    """Split `family/task`; either alone is enough if it is unambiguous. Raises ConfigError for
    unknown tasks."""
    pairs = [
        (key.removesuffix("_tasks"), known) for key, tasks in listed.items() for known in tasks
    ]
    families = dict(pairs)
    family, _, rest = task.partition("/")
    if family in families and rest:
        return family, rest
    named = [pair for pair in pairs if task in pair]
    if len(named) == 1:
        return named[0]
    names = ["/".join(pair) for pair in pairs]
    near = [name for name in names if task and task in name][:3] or [task]
    hint = did_you_mean(near[0], names, f"write FAMILY/TASK, with one of {', '.join(families)}")
    raise ConfigError(f"BALROG has no task {task!r}; {hint}")


class _Config(dict):
    """A mapping whose keys are also attributes, as BALROG reads its configuration."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(key) from error

    @classmethod
    def of(cls, value: Any) -> Any:
        return (
            cls({key: cls.of(inner) for key, inner in value.items()})
            if isinstance(value, Mapping)
            else value
        )


def _find(env: Any, name: str) -> Any:
    """Return the attribute of the outermost wrapper that has it; gymnasium's wrappers no longer
    forward attributes."""
    while env is not None:
        if hasattr(env, name):
            return getattr(env, name)
        env = getattr(env, "env", None)
    raise ConfigError(f"the environments of the installed BALROG have no {name}; {INSTALL}")
