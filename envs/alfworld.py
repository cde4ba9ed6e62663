"""ALFWorld: household tasks in text, from its data set, or from demo rooms built from its grammar.

A valid command is one that the game would accept right now; any other is replaced by `look`. Where no data set is
installed, the games are demo rooms, and the log, the prompt and the first observation say so.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from envs.alfworld_games.data import find_root, load_game
from envs.base import describe_task
from envs.command_game import CommandGame, clean_command, list_commands
from envs.errors import ConfigError, MissingDependencyError
from envs.text_game import Frame, GameOptions, read_game_options

FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
COMMANDS = {
    "look": "hear where you are and what is around you",
    "inventory": "hear what you carry",
    "go to PLACE": "walk there",
    "open PLACE": "open it, and see what is inside",
    "close PLACE": "close it",
    "take THING from PLACE": "pick something up",
    "move THING to PLACE": "put down what you carry",
    "examine THING": "have a closer look at a thing or a place",
    "use THING": "switch something on or off, a lamp for example",
    "clean THING with PLACE": "wash what you carry in a sink",
    "heat THING with PLACE": "heat what you carry in a microwave",
    "cool THING with PLACE": "cool what you carry in a fridge",
}
PRESETS = {
    "verlog": {"binary_reward": False, "format_penalty": 0.1},
    "balrog": {"binary_reward": False, "format_penalty": 0.0},
}
_MAX_STEPS = 50
_TASK = re.compile(r"Your task is to:\s*(.*?)\s*\.?\s*$", re.DOTALL)
# ALFWorld said "put ... in/on ..." before its version 0.4.
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ALFWorldOptions(GameOptions):
    """`source`: `auto` plays the data set where there is one and demo games elsewhere; `data` insists on it.

    `data_path` is the data set's folder (else `$ALFWORLD_DATA`), `split` the part of it that is played.
    """

    source: Literal["auto", "data", "demo"] = "auto"
    data_path: str | None = None
    split: Literal["train", "valid_seen", "valid_unseen"] = "train"
    admissible_commands: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vlm:
            raise ConfigError("env.vlm: ALFWorld is played in text here; leave it false")
        if self.source == "demo" and self.data_path is not None:
            raise ConfigError("env.data_path names a data set, which source: demo does not play; drop one of them")


def build_env(sample: Any, args: Any) -> ALFWorld:
    """Make the environment of `sample.metadata`'s task and seed with the options in `args.env`.

    Raises:
        ConfigError: unknown task (with the nearest names) or option, or no games where they were said to be.
        MissingDependencyError: alfworld or its planner is not installed.
    """
    task, seed = describe_task(sample)
    return ALFWorld(task, seed, read_game_options(ALFWorldOptions, args, PRESETS))


def expert_action(env: ALFWorld) -> str:
    """Return the next command of the planner's way to win, for demonstrations; it knows what is hidden where."""
    return env.advice()


class ALFWorld(CommandGame):
    """One ALFWorld episode; `demo` says whether it is played in a demo room."""

    template_path = Path(__file__).with_suffix(".j2")

    def __init__(self, task: str, seed: int, options: ALFWorldOptions) -> None:
        super().__init__(options)
        self.options: ALFWorldOptions = options
        self.task, self.seed, self._families = task, seed, find_families(task)
        self.max_steps = options.max_steps or _MAX_STEPS
        # The folder is looked for first: importing alfworld changes the variable that names it.
        self._root = None if options.source == "demo" else find_root(options.data_path)
        if options.source == "data" and self._root is None:
            raise ConfigError("env.source: data found no data set; run alfworld-download or set env.data_path")
        self.demo = self._root is None
        self._engine = _import_part("player")
        self._player: Any = None
        self._steps = 0

    def start(self) -> Frame:
        if self._player is None:
            self._player = self._engine.Player(self._load())
        self._steps, self._now = 0, self._player.reset()
        self._whole_way = 0
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
        shown = self._now.commands if self.options.admissible_commands and not self._now.won else ()
        return Frame(
            long_term=text,
            short_term=list_commands(shown) if shown else "",
            reward=float(self._now.won),
            terminated=self._now.won,
            truncated=self._steps >= self.max_steps and not self._now.won,
            progression=float(self._now.won),
            metrics={"demo_game": float(self.demo)},
        )

    def advice(self) -> str:
        """Return the planner's next command; `look` where it sees no way to win."""
        plan = self._player.plan()
        return plan[0] if plan else self.default_action

    def distance_left(self) -> float:
        """Commands of the planner's way from here, of those from the start; 1 where it sees none."""
        plan = self._player.plan()
        if not self._whole_way:
            self._whole_way = max(1, len(plan))
        return len(plan) / self._whole_way if plan else 1.0

    def prompt_variables(self) -> dict[str, Any]:
        return {**super().prompt_variables(), "commands": COMMANDS, "notice": self._notice()}

    def _load(self) -> dict[str, Any]:
        if self._root is not None:
            return load_game(self._root, self.options.split, self._families, self.seed)
        return _import_part("demo").make_demo_game(self._families[self.seed % len(self._families)], self.seed)

    def _notice(self) -> str:
        if not self.demo:
            return ""
        notice = _import_part("demo").NOTICE
        _log_once(notice)
        return notice

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
            self._player = None
        self._running = False


def find_families(task: str) -> tuple[str, ...]:
    """The task families that a name means: `all`, a family, or a name that begins one of them unmistakably.

    Raises:
        ConfigError: no family or several; the nearest names are listed.
    """
    if task == "all":
        return FAMILIES
    matches = [family for family in FAMILIES if family.startswith(task)] if task else []
    if len(matches) == 1:
        return (matches[0],)
    near = matches or difflib.get_close_matches(task, FAMILIES, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are all, {', '.join(FAMILIES)}"
    raise ConfigError(f"ALFWorld has no task {task!r}; {hint}")


_logged: set[str] = set()


def _log_once(notice: str) -> None:
    if notice not in _logged:
        _logged.add(notice)
        logger.warning("%s Download the data set with alfworld-download and set ALFWORLD_DATA to play it.", notice)


def _import_part(part: str) -> ModuleType:
    try:
        return importlib.import_module(f"envs.alfworld_games.{part}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"ALFWorld needs the package {error.name}; install it with: pip install 'slime-verlog[alfworld]' "
            "(its planner is compiled on the way, which takes cmake, a C++ compiler and some minutes)"
        ) from error
