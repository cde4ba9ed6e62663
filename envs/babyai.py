"""BabyAI as a text game: BALROG's mixed local tasks and every level that minigrid registers.

Text, missions, rewards and endings equal BALROG's for the same seed and actions; no picture is drawn unless
`vlm: true` asks for one.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.base import describe_task, make_image
from envs.errors import ConfigError, MissingDependencyError
from envs.text_game import Frame, GameOptions, TextGame, read_game_options

ACTIONS = {
    "turn left": "rotate a quarter turn to your left",
    "turn right": "rotate a quarter turn to your right",
    "go forward": "move one cell ahead",
    "pick up": "take the object in the cell right in front of you",
    "drop": "put down what you carry",
    "toggle": "use the object in the cell right in front of you",
}
_INDEX = {action: index for index, action in enumerate(ACTIONS)}
_JOINED = {action.replace(" ", ""): action for action in ACTIONS}
_TILE_PIXELS = 16

PRESETS = {
    "verlog": {"binary_reward": True, "format_penalty": 0.1},
    "balrog": {"binary_reward": False, "format_penalty": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class BabyAIOptions(GameOptions):
    """What BabyAI has beside the options of all games.

    `num_dists`: distracting objects; BALROG's 0 in the mixed tasks and the level's own elsewhere if None.
    """

    num_dists: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_dists is not None and self.num_dists < 0:
            raise ConfigError(f"env.num_dists must be >= 0, got {self.num_dists}")


def build_env(sample: Any, args: Any) -> BabyAI:
    """Make the environment of `sample.metadata`'s task and seed with the options in `args.env`.

    Raises:
        ConfigError: unknown task (with the nearest names) or option.
        MissingDependencyError: minigrid is not installed.
    """
    task, seed = describe_task(sample)
    return BabyAI(task, seed, read_game_options(BabyAIOptions, args, PRESETS))


def expert_action(env: BabyAI) -> str:
    """Return the action that minigrid's scripted player takes next in a running episode, for demonstrations.

    It follows what was really played: ask before every turn or only now and then, and take its advice or not.
    """
    return env.advice()


class BabyAI(TextGame):
    """One BabyAI episode; `game` is minigrid's own level object."""

    template_path = Path(__file__).with_suffix(".j2")
    actions = ACTIONS
    default_action = "go forward"

    def __init__(self, task: str, seed: int, options: BabyAIOptions) -> None:
        super().__init__(options)
        self.options: BabyAIOptions = options
        self.task, self.seed = task, seed
        self.game = _import_world("levels").make_level(task, options.num_dists)
        self._describe_view = _import_world("view").describe_view
        self._progression = 0.0
        self._expert: Any = None

    def start(self) -> Frame:
        self.game.reset(seed=self.seed)
        if self.options.max_steps is not None:
            self.game.max_steps = self.options.max_steps
        self.mission, self.max_steps = self.game.mission, self.game.max_steps
        self._progression, self._expert = 0.0, None
        return self._frame()

    def play(self, action: str) -> Frame:
        _, reward, terminated, truncated, _ = self.game.step(_INDEX[action])
        if self._expert is not None and not (terminated or truncated):
            self._expert.watch(_INDEX[action])
        if reward > 0:
            self._progression = 1.0
        return self._frame(float(reward), terminated, truncated)

    def translate(self, candidate: str) -> str | None:
        words = candidate.lower().replace("_", " ")
        return words if words in ACTIONS else _JOINED.get(words)

    def advice(self) -> str:
        """Return the action that a scripted expert would take now."""
        if self._expert is None:
            self._expert = _import_world("expert").Expert(self.game)
        return list(ACTIONS)[self._expert.advice()]

    def distance_left(self) -> float:
        return _import_world("distance").distance_left(self.game)

    def _frame(self, reward: float = 0.0, terminated: bool = False, truncated: bool = False) -> Frame:
        return Frame(
            long_term=self._describe_view(self.game),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            progression=self._progression,
            image=make_image(self.game.get_pov_render(tile_size=_TILE_PIXELS)) if self.options.vlm else None,
        )


def _import_world(part: str) -> ModuleType:
    # minigrid imports pygame, which greets on stdout.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        return importlib.import_module(f"envs.babyai_world.{part}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"BabyAI needs the package {error.name}; install it with: pip install 'slime-verlog[envs]'"
        ) from error
