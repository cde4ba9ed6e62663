"""The themes of TextWorld games, their parameters and prompts, and recipes for single games.

A `GameRecipe` determines its game completely, so its key identifies the built game on any machine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from envs.errors import ConfigError, did_you_mean

REVISION = 1
"""Increase it whenever the builder makes a different game from the same recipe."""


@dataclass(frozen=True)
class Theme:
    """A kind of game: default parameters, step limit, and the prompt's commands and tips."""

    parameters: Mapping[str, Any]
    max_steps: int
    commands: Mapping[str, str]
    tips: tuple[str, ...] = ()


_DATA = yaml.safe_load(Path(__file__).with_name("themes.yaml").read_text(encoding="utf-8"))


def _read_theme(theme: dict[str, Any]) -> Theme:
    sections = [_DATA["command_sections"][section] for section in theme["commands"]]
    commands = {command: text for section in sections for command, text in section.items()}
    tips = tuple(tip for entry in theme["tips"] for tip in ([entry] if isinstance(entry, str) else entry))
    return Theme(theme["parameters"], theme["max_steps"], commands, tips)


THEMES = {name: _read_theme(theme) for name, theme in _DATA["themes"].items()}
_ALIASES, _MODES, _LEVELS = _DATA["aliases"], _DATA["modes"], _DATA["levels"]


@dataclass(frozen=True)
class GameRecipe:
    """One generated game. Its objective names every step (`goal="detailed"`) or the last one (`"brief"`)."""

    theme: str
    seed: int
    goal: str
    parameters: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def key(self, version: str) -> str:
        """Return the name of the built game; `version` is TextWorld's."""
        digest = hashlib.blake2b(f"{REVISION}/{version}/{self.to_json()}".encode(), digest_size=10).hexdigest()
        return f"{self.theme}-{digest}"


def find_theme(task: str) -> str:
    """Return the theme of a task's name, ours, BALROG's or `tw-make`'s; raises ConfigError for an unknown one."""
    theme = _ALIASES.get(task, task)
    if theme not in THEMES:
        hint = did_you_mean(task, [*THEMES, *_ALIASES], f"there are {', '.join(THEMES)}", n=2)
        raise ConfigError(f"TextWorld has no task {task!r}; {hint}")
    return theme


def make_recipe(theme: str, seed: int, goal: str, given: Mapping[str, Any]) -> GameRecipe:
    """Complete the parameters with the theme's defaults; raises ConfigError for unknown or impossible ones."""
    known = THEMES[theme].parameters
    chosen = {key: value for key, value in given.items() if value is not None}
    for key in chosen:
        if key not in known:
            raise ConfigError(f"TextWorld's {theme} has no env.{key}; it has {', '.join(known)}")
    parameters = {**known, **chosen}
    mode, level = parameters.get("mode"), parameters.get("level")
    if mode is not None and mode not in _MODES[theme]:
        raise ConfigError(f"env.mode of {theme} must be one of {', '.join(_MODES[theme])}, got {mode!r}")
    if level is not None:
        if not 1 <= level <= _LEVELS[theme]:
            raise ConfigError(f"env.level of {theme} must be from 1 to {_LEVELS[theme]}, got {level}")
        clash = [key for key in ("rooms", "quest_length", "mode") if key in chosen]
        if clash:
            raise ConfigError(f"env.level sets {clash[0]} as well; remove one of them")
    if theme == "coin_collector" and level is None:
        rooms, length = parameters["rooms"], parameters["quest_length"]
        if not length <= rooms <= min(100, 4 * length if mode == "simple" else 100):
            raise ConfigError(
                f"coin_collector needs quest_length <= rooms <= 100 (and at most 4 x quest_length in mode simple), "
                f"got rooms: {rooms}, quest_length: {length}"
            )
    if theme == "the_cooking_game":
        if parameters["rooms"] not in (1, 6, 9, 12):
            raise ConfigError(f"the_cooking_game has 1, 6, 9 or 12 rooms, got {parameters['rooms']}")
        if not parameters["take"] <= parameters["recipe"] <= 5:
            raise ConfigError(
                f"the_cooking_game needs take <= recipe <= 5, got take: {parameters['take']}, "
                f"recipe: {parameters['recipe']}"
            )
        if parameters["recipe_seed"] and not parameters["take"]:
            raise ConfigError("env.recipe_seed needs env.take to be at least 1")
    return GameRecipe(theme, seed % 2**32, goal, parameters)
