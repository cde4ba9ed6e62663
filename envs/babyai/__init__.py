"""BabyAI as a text game: BALROG's mixed local tasks, all levels that minigrid registers, and
errands of chosen length.

Text, missions, rewards and endings equal BALROG's for the same seed and actions. `errands` is our
own task.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from envs.base import describe_task, make_image, read_env_settings
from envs.errors import ConfigError
from envs.loading import import_extra
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field

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
_ERRANDS = "errands"
_ERRAND_TURNS = 100
_PAR = 4.0
"""Turns per errand at which the progression is 1. The scripted player needs 4.9 with one object in
the room, so no player gets there, and the progression counts errands."""
_TILE_PIXELS = 16
_RENDER_PIXELS = 32


class BabyAISettings(GameSettings):
    """Settings of BabyAI."""

    binary_reward: bool = True
    """Replace every positive reward by 1; minigrid's own reward falls with the number of steps."""
    num_dists: int | None = Field(None, ge=0)
    """Distracting objects in the room; null for 0 in the mixed tasks and for the level's own number
    elsewhere."""
    pay_at_end: bool = False
    """`errands` only: pay for all errands when the time is up, instead of for each at once."""


class BabyAI(TextGame):
    """One BabyAI episode; `game` is minigrid's own level object."""

    settings: BabyAISettings
    template_path = Path(__file__).with_name("prompt.j2")
    actions = ACTIONS
    default_action = "go forward"

    def __init__(self, task: str, seed: int, settings: BabyAISettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self.game = _import_world("levels").make_level(task, settings.num_dists)
        self._describe_view = _import_world("levels").describe_view
        self._progression = 0.0
        self._expert: Any = None

    def start(self) -> Frame:
        self.game.reset(seed=self.seed)
        if self.settings.max_steps is not None:
            self.game.max_steps = self.settings.max_steps
        self.mission = self.game.mission
        self.max_steps = self.game.max_steps
        self._progression = 0.0
        self._expert = None
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
        """Return the action that the scripted player would take now."""
        if self._expert is None:
            self._expert = _import_world("expert").Expert(self.game)
        return list(ACTIONS)[self._expert.advice()]

    def distance_left(self) -> float:
        """Return 0 next to the mission's object, close to 1 in the far corner of the world; walls
        are ignored.

        Raises ConfigError if the mission has several instructions.
        """
        description = getattr(self.game.instrs, "desc", None)
        if description is None:
            raise ConfigError(
                "env.shaping needs a mission with one object (go to, pick up, open), but "
                f"{self.mission!r} has several; set env.shaping to 0"
            )
        if any(thing is self.game.carrying for thing in description.obj_set):
            return 0.0
        x, y = self.game.agent_pos
        steps = min(
            abs(thing.cur_pos[0] - x) + abs(thing.cur_pos[1] - y) for thing in description.obj_set
        )
        return max(0, int(steps) - 1) / (self.game.width + self.game.height)

    def render(self) -> np.ndarray:
        """Draw the whole level with the visible cells highlighted, as a uint8 array (32 * height,
        32 * width, 3)."""
        return self.game.get_full_render(highlight=True, tile_size=_RENDER_PIXELS)

    def _frame(
        self, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Frame:
        return Frame(
            long_term=self._describe_view(self.game),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            progression=self._progression,
            image=make_image(self.game.get_pov_render(tile_size=_TILE_PIXELS))
            if self.settings.vlm
            else None,
        )


class Errands(BabyAI):
    """`goto` in one new room after another, until `max_steps` turns (100) are over.

    Each turn tells the current mission and how many tenths of the time are left, so prompts look
    alike at any length. The end of the time is the task's own end (`terminated`), not a cut.
    """

    def __init__(self, seed: int, settings: BabyAISettings) -> None:
        super().__init__("goto", seed, settings)
        self.max_steps = settings.max_steps or _ERRAND_TURNS
        self._errands = 0
        self._owed = 0.0

    def start(self) -> Frame:
        self._errands = 0
        self._owed = 0.0
        self._next_room(self.seed)
        return self._frame()

    def play(self, action: str) -> Frame:
        _, reward, done, _, _ = self.game.step(_INDEX[action])
        if done:
            self._errands += 1
            self._next_room()
        elif self._expert is not None:
            self._expert.watch(_INDEX[action])
        return self._frame(float(reward > 0), terminated=self._turns >= self.max_steps)

    def _next_room(self, seed: int | None = None) -> None:
        """Draw the next room and its mission; without a seed, from the episode's own generator."""
        self.game.reset(seed=seed)
        self.game.max_steps = self.max_steps + 1  # the level's own limit never ends an errand
        self.mission = self.game.mission
        self._expert = None
        self._progression = min(1.0, self._errands * _PAR / self.max_steps)

    def _frame(
        self, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Frame:
        tenths = 10 * max(0, self.max_steps - self._turns - 1) // self.max_steps
        told = f"{self.mission}, time {tenths}"
        return replace(super()._frame(reward, terminated, truncated), short_term=told)

    def _pay(self, reward: float, valid: bool) -> float:
        """Keep what errands earn until the end if `pay_at_end`; penalties are charged at once."""
        paid = super()._pay(reward, valid)
        if not self.settings.pay_at_end:
            return paid
        self._owed += max(paid, 0.0)
        return min(paid, 0.0) + (0.0 if self._running else self._owed)

    def prompt_variables(self) -> dict[str, Any]:
        task = (
            "do as many errands as you can before the time is up. Each turn names the errand and "
            "the whole tenths of the time that will be left after it"
        )
        return {**super().prompt_variables(), "mission": task}


SETTINGS = BabyAISettings
DEFAULT_TASK = "goto"
expert_action = BabyAI.advice


def build_env(sample: Any, args: Any) -> BabyAI:
    """Build the environment for the task and seed in `sample.metadata`, with the settings in
    `args.env`."""
    task, seed = describe_task(sample)
    settings = read_env_settings(BabyAISettings, args)
    if task == _ERRANDS:
        return Errands(seed, settings)
    if settings.pay_at_end:
        raise ConfigError(
            f"env.pay_at_end is a setting of the task {_ERRANDS}, not of {task!r}; remove it"
        )
    return BabyAI(task, seed, settings)


def _import_world(part: str) -> ModuleType:
    # minigrid imports pygame, which prints a greeting.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    return import_extra(f"envs.babyai.{part}", "BabyAI", "envs")
