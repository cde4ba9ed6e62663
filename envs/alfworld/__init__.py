"""ALFWorld: household tasks in text, from its downloaded data set.

A command is valid if the game accepts it in the current state; any other is replaced by `look`. A game of the data set
lies at `json_2.1.1/SPLIT/FAMILY-.../TRIAL/game.tw-pddl`.
"""

import functools
import json
import os
import random
import re
from pathlib import Path
from typing import Any, Literal

from envs.errors import ConfigError, did_you_mean
from envs.loading import import_extra
from envs.text_game import CommandGame, Frame, GameSettings, PlannedGame, clean_command, list_commands

FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
_DEFAULT_ROOT = Path("~/.cache/alfworld")
_MAX_STEPS = 50
_TASK = re.compile(r"Your task is to:\s*(.*?)\s*\.?\s*$", re.DOTALL)
# The wording of ALFWorld before its version 0.4.
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")


class ALFWorldSettings(GameSettings):
    """Settings of ALFWorld."""

    no_pictures = "ALFWorld has no pictures here"

    data_path: str | None = None
    """Folder of the data set; null for `$ALFWORLD_DATA`, else `~/.cache/alfworld`."""
    split: Literal["train", "valid_seen", "valid_unseen"] = "train"
    """Part of the data set to play."""
    admissible_commands: bool = False
    """List the commands that the game would accept with every observation."""


class ALFWorld(PlannedGame, CommandGame):
    """One ALFWorld episode."""

    template_path = Path(__file__).with_name("prompt.j2")
    settings: ALFWorldSettings
    settings_model = ALFWorldSettings

    def __init__(self, task: str, seed: int, settings: ALFWorldSettings) -> None:
        super().__init__(settings)
        self.task, self.seed, self._families = task, seed, find_families(task)
        self.max_steps = settings.max_steps or _MAX_STEPS
        data_path = settings.data_path or os.environ.get("ALFWORLD_DATA")  # which the import of alfworld sets
        note = " (compiles a planner, which takes cmake, a C++ compiler and some minutes)"
        self._engine = import_extra("envs.alfworld.player", "ALFWorld", "alfworld", note)
        self._root = (Path(data_path) if data_path else _DEFAULT_ROOT).expanduser()
        if not (self._root / "json_2.1.1").is_dir():
            where = "set env.data_path or ALFWORLD_DATA to the data set, or run alfworld-download"
            raise ConfigError(f"ALFWorld's data set is not in {self._root}, which has no folder json_2.1.1; {where}")
        self._player: Any = None
        self._steps = 0

    def start(self) -> Frame:
        if self._player is None:
            game = load_game(self._root, self.settings.split, self._families, self.seed)
            self._player = self._engine.Player(game)
        self._steps, self._now = 0, self._player.reset()
        task = _TASK.search(self._now.text)
        self.mission = task.group(1) if task else ""
        return self._frame(self._now.text)

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
        )

    def plan(self) -> list[str]:
        """Return the commands of the game's planner, which knows hidden objects; empty if it finds no way to win."""
        return self._player.plan()

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
        self._player, self._running = None, False


SETTINGS = ALFWorldSettings
DEFAULT_TASK = "all"
build_env = ALFWorld.from_sample
expert_action = ALFWorld.advice


def find_families(task: str) -> tuple[str, ...]:
    """Return the families of `all`, of a family, or of the beginning of one; raises ConfigError for an unknown name."""
    if task == "all":
        return FAMILIES
    matches = [family for family in FAMILIES if family.startswith(task)] if task else []
    if len(matches) == 1:
        return (matches[0],)
    hint = did_you_mean(task, FAMILIES, f"there are all, {', '.join(FAMILIES)}", n=2)
    hint = f"did you mean {' or '.join(matches)}?" if matches else hint
    raise ConfigError(f"ALFWorld has no task {task!r}; {hint}")


@functools.cache
def list_games(root: Path, split: str, families: tuple[str, ...]) -> tuple[Path, ...]:
    """Return all games in one fixed shuffled order, without movable receptacles and slicing, as ALFWorld does."""
    found = [game for family in families for game in (root / "json_2.1.1" / split).glob(f"{family}-*/*/game.tw-pddl")]
    games = sorted(game for game in found if "movable" not in str(game) and "Sliced" not in str(game))
    random.Random(0).shuffle(games)
    return tuple(games)


def load_game(root: Path, split: str, families: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Read the seed's game, or the next solvable one; raises ConfigError if none is solvable or the file is damaged."""
    games = list_games(root, split, families)
    for offset in range(len(games)):
        path = games[(seed + offset) % len(games)]
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the ALFWorld game {path} cannot be read ({error}); download it again") from error
        if data.get("solvable"):
            return data
    raise ConfigError(
        f"no solvable game of {', '.join(families)} in {root / 'json_2.1.1' / split}; run alfworld-download"
    )
