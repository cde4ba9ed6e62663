"""ALFWorld: household tasks in text, from its data set or from demo rooms built from its grammar.

A command is valid if the game accepts it in the current state; any other is replaced by `look`. If the data set is not
installed, the games are demo rooms; the log, the prompt and the first observation say so.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import model_validator

from envs.alfworld.data import find_root, load_game, read_rooms
from envs.command_game import CommandGame, clean_command, list_commands
from envs.errors import ConfigError, did_you_mean
from envs.loading import import_extra
from envs.text_game import Frame, GameSettings, PlannedGame

FAMILIES = tuple(read_rooms()["families"])
_MAX_STEPS = 50
_TASK = re.compile(r"Your task is to:\s*(.*?)\s*\.?\s*$", re.DOTALL)
# The wording of ALFWorld before its version 0.4.
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")

logger = logging.getLogger(__name__)


class ALFWorldSettings(GameSettings):
    """Settings of ALFWorld."""

    no_pictures = "ALFWorld has no pictures here"

    source: Literal["auto", "data", "demo"] = "auto"
    """`data`: the downloaded data set. `demo`: rooms built from ALFWorld's grammar. `auto`: the data set if it is
    installed, else the demo."""
    data_path: str | None = None
    """Folder of the data set; null for `$ALFWORLD_DATA`, else `~/.cache/alfworld`."""
    split: Literal["train", "valid_seen", "valid_unseen"] = "train"
    """Part of the data set to play."""
    admissible_commands: bool = False
    """List the commands that the game would accept with every observation."""

    @model_validator(mode="after")
    def _check(self) -> ALFWorldSettings:
        if self.source == "demo" and self.data_path is not None:
            raise ConfigError("env.data_path has no effect with env.source: demo; remove one of them")
        return self


class ALFWorld(PlannedGame, CommandGame):
    """One ALFWorld episode; `demo` tells whether it takes place in a demo room."""

    template_path = Path(__file__).with_name("prompt.j2")
    settings: ALFWorldSettings
    settings_model = ALFWorldSettings

    def __init__(self, task: str, seed: int, settings: ALFWorldSettings) -> None:
        super().__init__(settings)
        self.task, self.seed, self._families = task, seed, find_families(task)
        self.max_steps = settings.max_steps or _MAX_STEPS
        # Before the import of alfworld, which changes $ALFWORLD_DATA.
        self._root = None if settings.source == "demo" else find_root(settings.data_path)
        if settings.source == "data" and self._root is None:
            raise ConfigError("env.source: data found no data set; run alfworld-download or set env.data_path")
        self.demo = self._root is None
        self._engine = _import_part("player")
        self._player: Any = None
        self._steps = 0

    def start(self) -> Frame:
        if self._player is None:
            if self._root is not None:
                game = load_game(self._root, self.settings.split, self._families, self.seed)
            else:
                family = self._families[self.seed % len(self._families)]
                game = _import_part("demo").make_demo_game(family, self.seed)
            self._player = self._engine.Player(game)
        self._steps, self._now = 0, self._player.reset()
        task = _TASK.search(self._now.text)
        self.mission = task.group(1) if task else ""
        return self._frame(f"{self._notice()}\n\n{self._now.text}".strip())

    def translate(self, candidate: str) -> str | None:
        command = clean_command(candidate.lower().replace("in/on", "on"))
        put = _PUT.fullmatch(command) if command else None
        return f"move {put.group(1)} to {put.group(2)}" if put else command

    def try_command(self, command: str) -> Frame | None:
        if command not in self._now.commands:
            return None
        self._steps, self._now = self._steps + 1, self._player.send(command)
        return self._frame(self._now.text)

    def _frame(self, text: str) -> Frame:
        shown = self._now.commands if self.settings.admissible_commands and not self._now.won else ()
        return Frame(
            long_term=text,
            short_term=list_commands(shown) if shown else "",
            reward=float(self._now.won),
            terminated=self._now.won,
            truncated=self._steps >= self.max_steps and not self._now.won,
            progression=float(self._now.won),
            metrics={"demo_game": float(self.demo)},
        )

    def plan(self) -> list[str]:
        """Return the commands of the game's planner, which knows hidden objects; empty if it finds no way to win."""
        return self._player.plan()

    def prompt_variables(self) -> dict[str, Any]:
        return {**super().prompt_variables(), "notice": self._notice()}

    def _notice(self) -> str:
        if not self.demo:
            return ""
        notice = _import_part("demo").NOTICE
        _warn_once(notice)
        return notice

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
            self._player = None
        self._running = False


SETTINGS = ALFWorldSettings
DEFAULT_TASK = "all"
build_env = ALFWorld.from_sample
expert_action = ALFWorld.advice


def find_families(task: str) -> tuple[str, ...]:
    """Return the task families of a task name: `all`, a family, or the beginning of exactly one family's name.

    Raises:
        ConfigError: no family or several have this name; the message lists the nearest ones.
    """
    if task == "all":
        return FAMILIES
    matches = [family for family in FAMILIES if family.startswith(task)] if task else []
    if len(matches) == 1:
        return (matches[0],)
    hint = did_you_mean(task, FAMILIES, f"there are all, {', '.join(FAMILIES)}", n=2)
    hint = f"did you mean {' or '.join(matches)}?" if matches else hint
    raise ConfigError(f"ALFWorld has no task {task!r}; {hint}")


@functools.cache
def _warn_once(notice: str) -> None:
    logger.warning("%s Download the data set with alfworld-download and set ALFWORLD_DATA to play it.", notice)


def _import_part(part: str) -> ModuleType:
    note = " (compiles a planner, which takes cmake, a C++ compiler and some minutes)"
    return import_extra(f"envs.alfworld.{part}", "ALFWorld", "alfworld", note)
