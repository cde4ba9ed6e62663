"""ALFWorld: household tasks in text, from its downloaded data set.

A command is valid if the game accepts it in the current state; any other is replaced by `look`. A
game of the data set lies at `json_2.1.1/SPLIT/FAMILY-.../TRIAL/game.tw-pddl`. The preset
`verl_agent` plays by verl-agent's rules instead.
"""

import functools
import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
from pydantic import model_validator

from envs.alfworld.verl_agent import WIN, load_templates, read_answer, write_prompt
from envs.base import Observation, StepInfo, describe_task, read_env_settings
from envs.errors import ConfigError
from envs.loading import import_extra
from envs.text_game import (
    CommandGame,
    Frame,
    GameSettings,
    PlannedGame,
    clean_command,
    list_commands,
)

FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
_DEFAULT_ROOT = Path("~/.cache/alfworld")
_TASK = re.compile(r"Your task is to:\s*(.*?)\s*\.?\s*$", re.DOTALL)
# The wording of ALFWorld before its version 0.4.
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")


class ALFWorldSettings(GameSettings):
    """Settings of ALFWorld."""

    no_pictures = "ALFWorld has no pictures here"

    preset: Literal["verlog", "balrog", "verl_agent"] = "verlog"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Defaults: `verlog` for training, `balrog` to measure as BALROG does. Keys that you set
    yourself win over both. `verl_agent` plays with the prompts, rules and rewards of verl-agent
    (docs/games.md)."""
    verl_agent: str | None = None
    """Folder of a checkout of verl-agent, from which the preset `verl_agent` reads the prompts."""
    data_path: str | None = None
    """Folder of the data set; null for `$ALFWORLD_DATA`, else `~/.cache/alfworld`."""
    split: Literal["train", "valid_seen", "valid_unseen"] = "train"
    """Part of the data set to play."""
    admissible_commands: bool = False
    """List the commands that the game would accept with every observation."""

    @model_validator(mode="after")
    def _check_verl_agent(self) -> Self:
        if self.preset != "verl_agent":
            return self
        if self.verl_agent is None:
            raise ConfigError(
                "env.verl_agent is null; for preset verl_agent, set it to a checkout of verl-agent"
            )
        for key in ("prompt_template", "show_time_left"):
            if getattr(self, key):
                raise ConfigError(
                    f"env.{key} would change verl-agent's prompts; remove it for preset verl_agent"
                )
        return self


class ALFWorld(PlannedGame, CommandGame):
    """One ALFWorld episode."""

    template_path = Path(__file__).with_name("prompt.j2")
    settings: ALFWorldSettings
    settings_model = ALFWorldSettings
    max_steps = 50

    def __init__(self, task: str, seed: int, settings: ALFWorldSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self._families = find_families(task)
        # Importing alfworld sets this variable.
        data_path = settings.data_path or os.environ.get("ALFWORLD_DATA")
        note = " (compiles a planner, which takes cmake, a C++ compiler and some minutes)"
        self._engine = import_extra("envs.alfworld.player", "ALFWorld", "alfworld", note)
        self._root = (Path(data_path) if data_path else _DEFAULT_ROOT).expanduser()
        if not (self._root / "json_2.1.1").is_dir():
            where = "set env.data_path or ALFWORLD_DATA to the data set, or run alfworld-download"
            raise ConfigError(
                f"ALFWorld's data set is not in {self._root}, which has no folder json_2.1.1; "
                f"{where}"
            )
        self._player: Any = None

    def start(self) -> Frame:
        if self._player is None:
            self._player = self._engine.Player(self._load_game())
        self._now = self._player.reset()
        task = _TASK.search(self._now.text)
        self.mission = task.group(1) if task else ""
        return self._frame()

    def _load_game(self) -> Mapping[str, Any]:
        return load_game(self._root, self.settings.split, self._families, self.seed)

    def translate(self, candidate: str) -> str | None:
        command = clean_command(candidate.lower().replace("in/on", "on"))
        put = _PUT.fullmatch(command) if command else None
        return f"move {put.group(1)} to {put.group(2)}" if put else command

    def try_command(self, command: str) -> Frame | None:
        return self._send(command) if command in self._now.commands else None

    def _send(self, command: str) -> Frame:
        self._now = self._player.send(command)
        return self._frame()

    def _frame(self) -> Frame:
        text = self._now.text
        won = self._now.won
        commands = self._now.commands
        shown = commands if self.settings.admissible_commands and not won else ()
        return Frame(
            long_term=text.strip(),
            short_term=list_commands(shown),
            reward=float(won),
            terminated=won,
            progression=float(won),
        )

    def plan(self) -> list[str]:
        """Return the commands of the game's planner, which knows hidden objects; empty if it finds
        no way to win."""
        return self._player.plan()

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
        self._player = None
        self._running = False


class VerlAgentALFWorld(ALFWorld):
    """One ALFWorld episode as verl-agent plays it.

    An answer is valid by its form alone, and its action is played whether it is valid or not.
    """

    whole_prompts = True
    answer_format = ""

    def __init__(self, task: str, seed: int, settings: ALFWorldSettings) -> None:
        super().__init__(task, seed, settings)
        self._templates = load_templates(Path(settings.verl_agent or ""))

    def start(self) -> Frame:
        self._past: list[tuple[str, str]] = []
        return super().start()

    def _load_game(self) -> Mapping[str, Any]:
        """Return the game that a verl-agent worker with this seed validates with first; in `train`,
        any game."""
        if self.settings.split == "train":
            game = super()._load_game()
        else:
            games = list_solvable(self._root, self.settings.split, self._families)
            order = np.random.RandomState(self.seed % 2**32).permutation(len(games))
            game = read_game(games[order[0]])
        self._family = game["family"]
        return game

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        action, self._valid, span = read_answer(response_text)
        self._action = action
        observation, done, info = super().step(response_text)
        info.update(executed_action=action, action=action if span else None, action_span=span)
        if done:
            info["metrics"] = {f"success/{self._family}": info["progression"]}
        return observation, done, info

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        self._past.append((self._now.text, self._action))
        return self._action if self._valid else None, self._send(self._action)

    def _pay(self, reward: float, valid: bool) -> float:
        return (1.0 if self.settings.binary_reward else WIN) * reward - (
            0.0 if valid else self.settings.format_penalty
        )

    def render_prompt(self) -> str:
        return ""

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        text = write_prompt(self._templates, self._past, self._now.text, self._now.commands)
        return {"role": "user", "content": text}

    def advice(self) -> str:
        """Return an answer with the first action of the plan."""
        return f"<think>The plan says so.</think><action>{super().advice()}</action>"


def build_env(sample: Any, args: Any) -> ALFWorld:
    """Return the episode of `sample.metadata`, by the rules of the preset in `args.env`."""
    settings = read_env_settings(ALFWorldSettings, args)
    make = VerlAgentALFWorld if settings.preset == "verl_agent" else ALFWorld
    return make(*describe_task(sample), settings)


def expert_action(env: ALFWorld) -> str:
    """Return what the planner would answer."""
    return env.advice()


SETTINGS = ALFWorldSettings
DEFAULT_TASK = "all"


def find_families(task: str) -> tuple[str, ...]:
    """Return the families of `all`, of a family, or of the beginning of one; raises ConfigError for
    an unknown name."""
    if task == "all":
        return FAMILIES
    matches = tuple(family for family in FAMILIES if task and family.startswith(task))
    if len(matches) == 1:
        return matches
    raise ConfigError(
        f"ALFWorld has no task {task!r}; there are all, {', '.join(matches or FAMILIES)}"
    )


@functools.cache
def list_games(root: Path, split: str, families: tuple[str, ...]) -> tuple[Path, ...]:
    """Return all games in one fixed shuffled order, without movable receptacles and slicing, as
    ALFWorld does."""
    folder = root / "json_2.1.1" / split
    found = [game for family in families for game in folder.glob(f"{family}-*/*/game.tw-pddl")]
    games = sorted(
        game for game in found if "movable" not in str(game) and "Sliced" not in str(game)
    )
    random.Random(0).shuffle(games)
    return tuple(games)


@functools.cache
def list_solvable(root: Path, split: str, families: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the solvable games in the order in which ALFWorld's loader meets them, which this disk
    decides."""
    known = set(list_games(root, split, families))
    games = []
    for folder, _, _ in os.walk(root / "json_2.1.1" / split, topdown=False):
        path = Path(folder, "game.tw-pddl")
        if path in known and read_game(path).get("solvable"):
            games.append(path)
    return tuple(games) or _refuse(root, split, families)


def load_game(root: Path, split: str, families: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Read the seed's game, or the next solvable one; raises ConfigError if none is solvable or the
    file is damaged."""
    games = list_games(root, split, families)
    for offset in range(len(games)):
        data = read_game(games[(seed + offset) % len(games)])
        if data.get("solvable"):
            return data
    return _refuse(root, split, families)


def read_game(path: Path) -> dict[str, Any]:
    """Return the game of a file, and its `family`; raises ConfigError if the file is damaged."""
    try:
        return {
            **json.loads(path.read_text(encoding="utf-8")),
            "family": path.parts[-3].partition("-")[0],
        }
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the ALFWorld game {path} cannot be read ({error}); download it again"
        ) from error


def _refuse(root: Path, split: str, families: tuple[str, ...]) -> NoReturn:
    raise ConfigError(
        f"no solvable game of {', '.join(families)} in {root / 'json_2.1.1' / split}; run "
        "alfworld-download"
    )
