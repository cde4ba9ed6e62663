"""Adapter to any gymnasium environment whose observations can be put into text.

In the YAML: `env: {id: MyGame-v0, kwargs: {...}}`, where `id` is a registered gymnasium id or the
import path of a class or function (`my_package.my_module:MyEnv`, `my_env.py:MyEnv`). Actions must
be Discrete or Text. The names of Discrete actions are read from the environment (`action_names` and
other usual places) unless `env.actions` gives them; its mapping `action_aliases`, if there is one,
holds other ways to write them.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
from gymnasium import spaces

from envs.base import make_image
from envs.errors import (
    ConfigError,
    EnvironmentFault,
    MissingDependencyError,
    place_of_method,
    warn_once,
)
from envs.loading import load_attribute
from envs.text_game import ANSWER_FORMAT, Frame, GameSettings, TextGame, text_parts
from slime_verlog import Field

_FREE_ANSWER = ANSWER_FORMAT.replace("one allowed action", "what you do")
_ACTION_ATTRIBUTES = ("action_names", "language_action_space", "get_action_meanings", "actions")


class GymnasiumSettings(GameSettings):
    """Settings of the adapter: how to make the environment, read its observations and name its
    actions."""

    id: str | None = None
    """Registered gymnasium id, or import path of a class or function; null for the task's name."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment."""
    task_kwarg: str | None = None
    """Keyword argument that receives the task's name."""
    describe: str | None = None
    """Import path of a function from an observation to text, or to BALROG's two text parts. Without
    it, text is the observation or its only text (or its entry `text`), else what `render` prints if
    the environment has `render_mode: ansi`, else the observation's texts and numbers."""
    actions: Mapping[str, str] | tuple[str, ...] | None = None
    """Names of the Discrete actions in order, or the allowed Text actions; a mapping adds
    descriptions."""
    default_action: str | None = None
    """Executed in place of an invalid response; null for the environment's own default action, else
    the first one."""
    instruction: str | None = None
    """Description of the game for the prompt."""
    deterministic: bool = True
    """Whether seed and actions determine the episode, which allows a replay after a crash."""


class GymnasiumText(TextGame):
    """One episode of a gymnasium environment; `env` is the wrapped one."""

    template_path = Path(__file__).with_name("prompt.j2")
    settings: GymnasiumSettings
    settings_model = GymnasiumSettings

    def __init__(self, task: str, seed: int, settings: GymnasiumSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self.deterministic = settings.deterministic
        kwargs = dict(settings.kwargs)
        if settings.task_kwarg:
            kwargs[settings.task_kwarg] = task
        if settings.vlm:
            kwargs.setdefault("render_mode", "rgb_array")
        self.env = _make(settings.id or task, kwargs, settings.max_steps)
        prints_text = "ansi" in (self.env.metadata.get("render_modes") or ())
        needs_text = not settings.describe and _text_of(self.env.observation_space) is None
        if prints_text and needs_text and "render_mode" not in kwargs:
            self.env.close()
            self.env = _make(
                settings.id or task, {**kwargs, "render_mode": "ansi"}, settings.max_steps
            )
        self._read = observation_reader(self.env, settings.describe)
        self.actions = _name_actions(self.env, settings)
        self._by_words = {_words(name): name for name in self.actions}
        aliases: Mapping[str, str] = _attribute(self.env, "action_aliases") or {}
        self._exact = {name: name for name in self.actions}  # names may differ in case alone
        # env.actions may rename actions.
        self._exact |= {key: name for key, name in aliases.items() if name in self.actions}
        default = (
            settings.default_action
            or _attribute(self.env, "default_action")
            or next(iter(self.actions), None)
        )
        if default is None:
            raise ConfigError(
                "env.default_action is needed with free text actions: it replaces an invalid answer"
            )
        if default not in (self.actions or self.env.action_space):
            legal = ", ".join(self.actions) or self.env.action_space
            raise ConfigError(f"env.default_action {default!r} is not one of the actions: {legal}")
        self.default_action = default
        self.answer_format = ANSWER_FORMAT if self.actions else _FREE_ANSWER
        self.max_steps = (
            settings.max_steps or getattr(self.env.spec, "max_episode_steps", None) or 0
        )
        self._closed = False

    def start(self) -> Frame:
        observation, info = self._answered(
            "reset", self.env.reset(seed=self.seed), "(observation, info)"
        )
        mission = observation.get("mission") if isinstance(observation, Mapping) else None
        self.mission = str(
            mission or info.get("mission") or getattr(self.env.unwrapped, "mission", "")
        )
        return self._frame(observation)

    def play(self, action: str) -> Frame:
        space = self.env.action_space
        value = (
            int(space.start) + [*self.actions].index(action)
            if isinstance(space, spaces.Discrete)
            else action
        )
        form = "(observation, reward, terminated, truncated, info)"
        observation, paid, terminated, truncated, info = self._answered(
            "step", self.env.step(value), form
        )
        if not isinstance(paid, SupportsFloat):
            raise EnvironmentFault(
                f"step paid the reward {paid!r:.60}, not a number ({self._place('step')})"
            )
        reward = float(paid)
        progression = info.get("progression", info.get("is_success", terminated and reward > 0))
        return self._frame(
            observation, reward, bool(terminated), bool(truncated), float(progression)
        )

    def _answered(self, method: str, answer: Any, form: str) -> tuple[Any, ...]:
        """Return what the game's method returned; raises EnvironmentFault, with its place, for
        another form."""
        if (
            isinstance(answer, tuple)
            and len(answer) == form.count(",") + 1
            and isinstance(answer[-1], Mapping)
        ):
            return answer
        said = f"{method} returned {answer!r:.100}, but Gymnasium's {method} returns {form}"
        raise EnvironmentFault(f"{said} ({self._place(method)})")

    def _place(self, method: str) -> str:
        return place_of_method(self.env.unwrapped, method)

    def translate(self, candidate: str) -> str | None:
        if self.actions:
            return self._exact.get(candidate) or self._by_words.get(_words(candidate))
        return candidate if candidate in self.env.action_space else None

    def prompt_variables(self) -> dict[str, Any]:
        return {
            **super().prompt_variables(),
            "instruction": self.settings.instruction or "",
            "task": self.task,
        }

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.env.close()

    def _frame(self, observation: Any, *outcome: Any) -> Frame:
        text = self._read(observation)
        parts = text_parts(text)
        if parts is None:
            raise EnvironmentFault(f"{self.env} returned {text!r} as the text of an observation")
        if not self.settings.vlm:
            return Frame(*parts, *outcome)
        drawn: Any = self.env.render()
        if getattr(drawn, "ndim", 0) != 3:
            wanted = "not an array (height, width, 3); env.vlm needs render_mode rgb_array"
            raise EnvironmentFault(
                f"render returned {drawn!r:.60}, {wanted} ({self._place('render')})"
            )
        return Frame(*parts, *outcome, image=make_image(drawn))


SETTINGS = GymnasiumSettings
build_env = GymnasiumText.from_sample


def _make(name: str, kwargs: Mapping[str, Any], max_steps: int | None) -> gymnasium.Env:
    """Make the environment; `max_steps` replaces the registered step limit."""
    if _is_import_path(name):
        env = load_attribute(name, "env.id")(**kwargs)
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"env.id: {name} made {env!r}, which is not a gymnasium environment")
        return gymnasium.wrappers.TimeLimit(env, max_steps) if max_steps else env
    try:
        return gymnasium.make(name, max_episode_steps=max_steps, disable_env_checker=True, **kwargs)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingDependencyError(
            f"env.id: {name} needs a package that is not installed: {error}"
        ) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.id: gymnasium cannot make {name!r}: {error}") from error


def _is_import_path(name: str) -> bool:
    """Tell `module:Class` and `module.Class` from gymnasium's `Name-v0` and `module:Name-v0`."""
    _, colon, last = name.rpartition(":")
    if name in gymnasium.registry or (colon and not last.isidentifier()):
        return False
    return bool(colon) or ("." in name and all(part.isidentifier() for part in name.split(".")))


def _name_actions(
    env: gymnasium.Env, settings: GymnasiumSettings
) -> Mapping[str, str] | Sequence[str]:
    """Return the names of the actions: of all, in order, for Discrete spaces; of the allowed ones
    for Text."""
    space = env.action_space
    if isinstance(space, spaces.Text):
        if not settings.actions and " " not in space.character_set:
            without = f"{env.unwrapped}: its action space {space} has no blank"
            warn_once(
                f"{without}, so no answer of several words is valid; add one to its charset, or "
                "set env.actions"
            )
        return settings.actions or ()
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(
            f"{env} takes {space}; only Discrete and Text actions can be named in an answer"
        )
    if settings.actions:
        if (count := len(set(settings.actions))) != space.n:
            raise ConfigError(
                f"env.actions names {count} actions, but {env} has {space.n}; name all, in order"
            )
        return settings.actions
    for attribute in _ACTION_ATTRIBUTES:
        # Lists, mappings, enums, or Atari's method.
        found: Any = _attribute(env, attribute)
        if attribute == "get_action_meanings" and callable(found):
            found = found()
        if isinstance(found, type) and issubclass(found, enum.Enum):
            found = [
                _words(member.name) for member in sorted(found, key=lambda member: member.value)
            ]
        if not isinstance(found, Mapping | list | tuple) or not all(
            isinstance(name, str) for name in found
        ):
            continue
        if len(found) == len(set(found)) == space.n:
            return found
    return [str(space.start + number) for number in range(space.n)]


def _attribute(env: gymnasium.Env, name: str) -> Any:
    """Return the attribute of the outermost wrapper that has it; None if there is none."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None


def _words(text: str) -> str:
    return text.strip().lower().replace("_", " ")


_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)


def observation_reader(env: gymnasium.Env, describe: str | None) -> Callable[[Any], Any]:
    """Return the function from observation to text; raises ConfigError if it has none."""
    space = env.observation_space
    if describe:
        return load_attribute(describe, "env.describe")
    if text := _text_of(space):
        return text
    if env.render_mode == "ansi":
        return lambda _: name_colors(_printed(env))
    return lambda observation: write(space, observation)


def _text_of(space: gymnasium.Space) -> Callable[[Any], Any] | None:
    """Return the function from an observation to its text; None unless it has one text, or one that
    is so called."""
    if isinstance(space, spaces.Text):
        return lambda observation: observation
    if not isinstance(space, spaces.Dict):
        return None
    texts = [name for name, part in space.spaces.items() if isinstance(part, spaces.Text)]
    if "text" in space.spaces:
        return itemgetter("text")
    return itemgetter(texts[0]) if len(texts) == 1 else None


def _printed(env: gymnasium.Env) -> str:
    drawn: Any = env.render()
    if isinstance(drawn, str) and drawn.strip():
        return drawn
    where = place_of_method(env.unwrapped, "render")
    raise EnvironmentFault(
        f"with render_mode ansi, render returned {drawn!r:.60}, not text that the model could see; "
        f"return the text, or set env.describe ({where})"
    )


def name_colors(text: str) -> str:
    """Replace a terminal's colors, which often mark the player, by their names: `[red S]FFF`."""

    def named(found: re.Match[str]) -> str:
        names = [_COLORS[int(digit)] for digit in re.findall(r"\b[349]([0-7])\b", found[1])]
        return f"[{' '.join([*names, found[2]])}]"

    return re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", _COLORED.sub(named, text))


def write(space: gymnasium.Space, value: Any) -> str:
    """Write the texts and numbers of an observation: a line per entry of a Dict, a line for the
    parts of a Tuple.

    Raises ConfigError if it has other parts.
    """
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {write(part, value[key])}" for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(write(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return value
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return str(value.tolist() if hasattr(value, "tolist") else value)
    raise ConfigError(
        f"the environment observes {space}, which is not text; set env.describe to the import path "
        "of a function that returns the text of an observation"
    )
