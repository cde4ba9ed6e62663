"""TextWorld: text adventures generated on demand from a theme, its parameters and the seed.

The game's own parser decides what is a valid command: one that it counts as a turn. Whatever it does not
understand is invalid, changes nothing, and `look` is played instead. Games are built once and cached on disk.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from envs.base import describe_task
from envs.command_game import CommandGame, list_commands
from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.text_game import Frame, GameOptions, read_game_options
from envs.textworld_games.cache import GameCache, default_root
from envs.textworld_games.recipes import THEMES, GameRecipe, find_theme, make_recipe
from envs.textworld_games.source import build_game, find_game
from envs.textworld_games.thoughts import explain_plan

PRESETS = {
    "verlog": {"binary_reward": False, "format_penalty": 0.1},
    # BALROG cuts every game at 80 steps and leaves the objective to the `goal` command.
    "balrog": {"binary_reward": False, "format_penalty": 0.0, "max_steps": 80, "goal": "hidden"},
}
_SEED_BLOCK = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TextWorldOptions(GameOptions):
    """What is generated (None: the theme's default), shown and paid.

    `rooms`, `objects`, `quest_length`, `mode` or `level` shape a world; `recipe` to `split` are the cooking
    game's; `held_out` gives the simple game its test foods. `goal` is how much of the objective the prompt tells:
    every step (`detailed`), the last one (`brief`) or nothing (`hidden`). `reward`, which adds up to 1 on the way
    to winning: `sparse` pays the win, `score` the game's points as they come, `dense` every step nearer to the
    win, and takes it back for a step away. `games` is how many games the seeds fold into, held-out seeds apart.
    `games_path` plays the `.z8` games of a folder instead (BALROG's, say), the seed choosing.
    """

    rooms: int | None = None
    objects: int | None = None
    quest_length: int | None = None
    mode: str | None = None
    level: int | None = None
    recipe: int | None = None
    take: int | None = None
    open: bool | None = None
    cook: bool | None = None
    cut: bool | None = None
    drop: bool | None = None
    recipe_seed: int | None = None
    split: Literal["train", "valid", "test"] | None = None
    held_out: bool | None = None
    goal: Literal["detailed", "brief", "hidden"] = "brief"
    reward: Literal["sparse", "score", "dense"] = "score"
    admissible_commands: bool = False
    games: int | None = None
    games_path: str | None = None
    cache_dir: str | None = None
    cache_gb: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vlm:
            raise ConfigError("env.vlm: TextWorld has no pictures; leave it false")
        if self.games is not None and self.games < 1:
            raise ConfigError(f"env.games must be at least 1, got {self.games}")
        if self.cache_gb <= 0:
            raise ConfigError(f"env.cache_gb must be greater than 0, got {self.cache_gb}")
        if self.drop and self.reward == "dense":
            raise ConfigError("env.reward: dense needs the game to know its solution, which drop: true prevents")


def build_env(sample: Any, args: Any) -> TextWorld:
    """Make the environment of `sample.metadata`'s task and seed with the options in `args.env`.

    Raises:
        ConfigError: unknown task (with the nearest names) or option, or one that the theme does not have.
        MissingDependencyError: textworld is not installed.
    """
    task, seed = describe_task(sample)
    return TextWorld(task, seed, read_game_options(TextWorldOptions, args, PRESETS))


def expert_action(env: TextWorld) -> str:
    """Return the command that leads from here to winning, as far as the game knows, for demonstrations."""
    return env.advice()


def explain_action(env: TextWorld) -> str:
    """Return the thought behind `expert_action(env)`."""
    return env.explain()


class TextWorld(CommandGame):
    """One TextWorld episode."""

    template_path = Path(__file__).with_suffix(".j2")

    def __init__(self, task: str, seed: int, options: TextWorldOptions) -> None:
        super().__init__(options)
        self.options: TextWorldOptions = options
        self.task, self.seed, self.theme = task, seed, _find_theme(task, options)
        self.max_steps = options.max_steps or THEMES[self.theme].max_steps
        self._recipe = _read_recipe(self.theme, seed, options)
        self._engine = _import_player()
        self._player: Any = None
        self._guide: Any = None
        self._history: list[str] = []

    def start(self) -> Frame:
        if self._player is None:
            track = self.options.admissible_commands or self.options.reward == "dense"
            self._player = self._engine.Player(self._game_file(), track=track)
        self._close_guide()
        self._now = self._player.reset()
        self._history.clear()
        self._distance = self._whole_way = len(self._now.plan)
        if self.options.reward == "dense" and not self._whole_way:
            raise EnvironmentFault(f"no solution is known from the start, which reward: dense needs: {self._recipe}")
        self.mission = "" if self.options.goal == "hidden" else self._player.objective
        return self._frame(0.0)

    def try_command(self, command: str) -> Frame | None:
        moment = self._player.send(command)
        if moment is None:
            return None
        before, self._now = self._now, moment
        self._history.append(command)
        return self._frame(self._reward(before.score, moment))

    def _reward(self, score_before: int, moment: Any) -> float:
        if self.options.reward == "sparse":
            return float(moment.won)
        if self.options.reward == "score":
            return (moment.score - score_before) / self._player.max_score
        before = self._distance
        if moment.won or moment.plan:
            self._distance = len(moment.plan)
        return (before - self._distance) / self._whole_way

    def _frame(self, reward: float) -> Frame:
        moment, share = self._now, self._now.score / self._player.max_score
        ended = moment.won or moment.lost
        shown = moment.commands if self.options.admissible_commands and not ended else ()
        return Frame(
            long_term=moment.text,
            short_term=list_commands(shown) if shown else "",
            reward=reward,
            terminated=ended,
            truncated=len(self._history) >= self.max_steps and not ended,
            progression=1.0 if moment.won else min(max(share, 0.0), 1.0),
            metrics={"score": share, "lost": float(moment.lost)},
        )

    def advice(self) -> str:
        """Return the next command of a plan that wins from here; `look` where none is known."""
        plan = self._plan()
        return plan[0] if plan else self.default_action

    def explain(self) -> str:
        """Return the thought behind `advice`: the goal, whether the next thing is in sight, and why this command."""
        return explain_plan(self._now.text, self._plan())

    def _plan(self) -> tuple[str, ...]:
        """Commands that win from here, as far as the game knows; none where it knows no way."""
        if self._now.plan:
            return self._now.plan
        if self._guide is None:
            # A second game that tracks the state catches up with this one; most episodes never need it.
            self._guide, self._guided = self._engine.Player(self._game_file(), track=True), 0
            self._advised = self._guide.reset()
        for command in self._history[self._guided :]:
            self._advised = self._guide.send(command)
        self._guided = len(self._history)
        if self._advised.plan:
            return self._advised.plan
        known = self._player.walkthrough
        on_the_way = tuple(self._history) == known[: len(self._history)]
        return known[len(self._history) :] if on_the_way else ()

    def prompt_variables(self) -> dict[str, Any]:
        theme = THEMES[self.theme]
        return {**super().prompt_variables(), "commands": dict(theme.commands), "tips": list(theme.tips)}

    def close(self) -> None:
        self._close_guide()
        if self._player is not None:
            self._player.close()
            self._player = None
        self._running = False

    def _close_guide(self) -> None:
        if self._guide is not None:
            self._guide.close()
            self._guide = None

    def _game_file(self) -> Path:
        if self.options.games_path is not None:
            return find_game(Path(self.options.games_path), self.task, self.seed)
        root = Path(self.options.cache_dir).expanduser() if self.options.cache_dir else default_root()
        cache = GameCache(root, self.options.cache_gb)
        return cache.fetch(
            self._recipe.key(self._engine.textworld_version()), lambda folder: build_game(self._recipe, folder)
        )


def _find_theme(task: str, options: TextWorldOptions) -> str:
    """The theme of a task; a folder of games may be called anything, and is then prompted like a custom game."""
    try:
        return find_theme(task)
    except ConfigError:
        if options.games_path is None:
            raise
        return "custom"


def _read_recipe(theme: str, seed: int, options: TextWorldOptions) -> GameRecipe:
    given = {name: getattr(options, name) for other in THEMES.values() for name in other.parameters}
    if options.games_path is not None:
        useless = [name for name, value in given.items() if value is not None]
        if useless:
            raise ConfigError(f"env.{useless[0]} shapes a generated game, but env.games_path plays finished ones")
    if options.games is not None:
        seed = seed // _SEED_BLOCK * _SEED_BLOCK + seed % _SEED_BLOCK % options.games
    goal = "detailed" if options.goal == "detailed" else "brief"
    return make_recipe(theme, seed, goal, given)


def _import_player() -> ModuleType:
    try:
        return importlib.import_module("envs.textworld_games.player")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"TextWorld needs the package {error.name}; install it with: pip install 'slime-verlog[text-games]'"
        ) from error
