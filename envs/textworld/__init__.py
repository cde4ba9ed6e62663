"""TextWorld: text adventures generated on demand from a theme, its parameters and the seed.

A command is valid if the game's parser counts it as a turn. Any other command changes nothing, and
`look` is played instead. Games are built once and cached on disk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from envs.errors import ConfigError, EnvironmentFault
from envs.loading import import_extra
from envs.text_game import CommandGame, Frame, GameSettings, list_commands
from envs.textworld import games
from slime_verlog import Field

_SEED_BLOCK = 1_000_000_000
_BETWEEN = re.compile(r" (?:with|from|on|into|in) ")
"""Stands between the thing that a command is about and a second one."""


class TextWorldSettings(GameSettings):
    """Settings of TextWorld. Settings that shape a game, such as `rooms`, are null by default: the
    task's theme then sets them."""

    no_pictures = "TextWorld has no pictures"
    # BALROG ends every game after 80 steps and leaves the objective to the `goal` command.
    balrog: ClassVar = {**GameSettings.balrog, "max_steps": 80, "goal": "hidden"}

    rooms: int | None = Field(None, ge=1)
    """Rooms in the world; 1, 6, 9 or 12 in the_cooking_game."""
    objects: int | None = Field(None, ge=1)
    """Objects in the world (custom)."""
    quest_length: int | None = Field(None, ge=1)
    """Commands that the quest takes (custom, treasure_hunter, coin_collector)."""
    mode: str | None = None
    """`easy`, `medium` or `hard` in treasure_hunter; `simple` or `random` in coin_collector."""
    level: int | None = None
    """TextWorld's levels instead of rooms, quest_length and mode: treasure_hunter 1 to 30,
    coin_collector 1 to 300."""
    recipe: int | None = Field(None, ge=1)
    """Ingredients of the recipe, 1 to 5 (the_cooking_game)."""
    take: int | None = Field(None, ge=0)
    """Ingredients that must be found first, at most `recipe` (the_cooking_game)."""
    open: bool | None = None
    """Containers and doors start closed and have to be opened (the_cooking_game)."""
    cook: bool | None = None
    """Ingredients must be cooked (the_cooking_game)."""
    cut: bool | None = None
    """Ingredients must be cut (the_cooking_game)."""
    drop: bool | None = None
    """The number of things one can carry is limited (the_cooking_game)."""
    recipe_seed: int | None = None
    """Seed of the recipe, apart from the seed of the world (the_cooking_game); needs `take` of at
    least 1."""
    split: Literal["train", "valid", "test"] | None = None
    """Restrict the ingredients to one of TextWorld's splits (the_cooking_game)."""
    held_out: bool | None = None
    """Use the foods that TextWorld reserves for testing (simple)."""
    goal: Literal["detailed", "brief", "hidden"] = "brief"
    """What the prompt tells of the objective: every step (`detailed`), the last (`brief`) or
    nothing (`hidden`)."""
    reward: Literal["sparse", "score", "dense"] = "score"
    """`sparse`: 1 for winning. `score`: the game's points, scaled to 1 in total. `dense`: progress
    along the shortest known solution, scaled to 1 in total; steps away from it cost as much."""
    admissible_commands: bool = False
    """List the commands that would work now with every observation. Random play then chooses among
    them."""
    games: int | None = Field(None, ge=1)
    """Number of different games, for training and held-out seeds separately; null: a new game for
    every seed."""
    games_path: str | None = None
    """Folder of finished `.z8` games, such as BALROG's, to play instead of generated ones; the seed
    chooses."""
    cache_gb: float = Field(2.0, gt=0)
    """Size limit in GB of the folder for generated games, `$SLIME_VERLOG_CACHE/textworld`, else
    `~/.cache/slime-verlog/textworld`; the games unused for longest are deleted first."""

    @model_validator(mode="after")
    def _check(self) -> TextWorldSettings:
        if self.drop and self.reward == "dense":
            raise ConfigError(
                "env.reward: dense needs a game with a known solution, which drop: true prevents"
            )
        return self


class TextWorld(CommandGame):
    """One TextWorld episode."""

    template_path = Path(__file__).with_name("prompt.j2")
    settings: TextWorldSettings
    settings_model = TextWorldSettings

    def __init__(self, task: str, seed: int, settings: TextWorldSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        # With games_path, the task may have any name.
        self.theme = games.find_theme(task, otherwise="custom" if settings.games_path else None)
        self.max_steps = settings.max_steps or games.THEMES[self.theme].max_steps
        self._recipe = _read_recipe(self.theme, seed, settings)
        self._engine = import_extra("envs.textworld.player", "TextWorld", "text-games")
        self._tracks = settings.admissible_commands or settings.reward == "dense"
        self._player: Any = None
        self._history: list[str] = []

    def start(self) -> Frame:
        if self._player is None:
            self._player = self._engine.Player(self._game_file(), track=self._tracks)
        self._now = self._player.reset()
        self._history.clear()
        self._distance = self._whole_way = len(self._now.plan)
        if self.settings.reward == "dense" and not self._whole_way:
            raise EnvironmentFault(
                f"reward: dense needs a game with a known solution, unlike {self._recipe}"
            )
        self.mission = "" if self.settings.goal == "hidden" else self._player.objective
        return self._frame(0.0)

    def try_command(self, command: str) -> Frame | None:
        moment = self._player.send(command)
        if moment is None:
            return None
        before = self._now
        self._now = moment
        self._history.append(command)
        if self.settings.reward == "sparse":
            return self._frame(float(moment.won))
        if self.settings.reward == "score":
            return self._frame((moment.score - before.score) / self._player.max_score)
        left = self._distance
        if moment.won or moment.plan:
            self._distance = len(moment.plan)
        return self._frame((left - self._distance) / self._whole_way)

    def _frame(self, reward: float) -> Frame:
        moment = self._now
        share = self._now.score / self._player.max_score
        ended = moment.won or moment.lost
        shown = self.actions = (
            moment.commands if self.settings.admissible_commands and not ended else ()
        )
        return Frame(
            long_term=moment.text,
            short_term=list_commands(shown),
            reward=reward,
            terminated=ended,
            progression=1.0 if moment.won else min(max(share, 0.0), 1.0),
            metrics={"score": share, "lost": float(moment.lost)},
        )

    def advice(self) -> str:
        """Return the next command of a plan that wins from here; `look` if none is known."""
        plan = self._plan()
        return plan[0] if plan else self.default_action

    def explain(self) -> str:
        """Return the reasoning behind `advice`: the goal, whether the next thing is visible, and
        why this command."""
        return explain_plan(self._now.text, self._plan())

    def _plan(self) -> tuple[str, ...]:
        """Return commands that win from here; empty if the game knows none."""
        if not self._tracks:
            # From now on, a copy of the game that tracks the state is played, after a replay up to
            # here.
            self._tracks = True
            self._player.close()
            self._player = self._engine.Player(self._game_file(), track=True)
            self._now = self._player.reset()
            for command in self._history:
                self._now = self._player.send(command)
        played = len(self._history)
        known = self._player.walkthrough
        return self._now.plan or (known[played:] if tuple(self._history) == known[:played] else ())

    def prompt_variables(self) -> dict[str, Any]:
        theme = games.THEMES[self.theme]
        return {
            **super().prompt_variables(),
            "commands": dict(theme.commands),
            "tips": list(theme.tips),
        }

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
        self._player = None
        self._running = False

    def _game_file(self) -> Path:
        if self.settings.games_path is not None:
            return games.find_game(Path(self.settings.games_path), self.task, self.seed)
        cache = games.GameCache(games.default_root(), self.settings.cache_gb)
        key = self._recipe.key(self._engine.textworld.__version__)
        return cache.fetch(key, lambda folder: games.build_game(self._recipe, folder))


SETTINGS = TextWorldSettings
DEFAULT_TASK = "custom"
build_env = TextWorld.from_sample
expert_action = TextWorld.advice
explain_action = TextWorld.explain


def _read_recipe(theme: str, seed: int, settings: TextWorldSettings) -> games.GameRecipe:
    given = {
        name: getattr(settings, name)
        for other in games.THEMES.values()
        for name in other.parameters
    }
    if settings.games_path is not None:
        useless = [name for name, value in given.items() if value is not None]
        if useless:
            raise ConfigError(
                f"env.{useless[0]} shapes generated games; remove it to play env.games_path"
            )
    if settings.games is not None:
        seed = seed // _SEED_BLOCK * _SEED_BLOCK + seed % _SEED_BLOCK % settings.games
    return games.make_recipe(
        theme, seed, "detailed" if settings.goal == "detailed" else "brief", given
    )


def explain_plan(observation: str, plan: Sequence[str]) -> str:
    """Return the reasoning behind the first command of a plan that wins from here."""
    if not plan:
        return "I know no way to win from here, so I look around."
    # Walking serves the first command that is not a move.
    deed = next((step for step in plan if not step.startswith("go ")), "")
    thing = _BETWEEN.split(deed.partition(" ")[2])[0]
    sight = ""
    if thing:
        seen = re.search(rf"\b{re.escape(thing)}\b", observation, re.IGNORECASE)
        sight = f" I see the {thing}." if seen else f" I do not see the {thing}."
    return f"My last step will be: {plan[-1]}.{sight} Now comes: {plan[0]}."
