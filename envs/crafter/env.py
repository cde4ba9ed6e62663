"""Crafter as a text game, in BALROG's words.

Text, rewards, progression and deaths equal BALROG's for the same seed and actions, nights included. Running out of
steps is `truncated` here, but `terminated` in BALROG. The world draws the random numbers of BALROG's 256 x 256
images even if none is shown, so `vlm` does not change the game.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from envs.crafter.expert import advise
from envs.crafter.image import draw, draw_clear
from envs.crafter.thoughts import explain
from envs.crafter.vocabulary import ACTIONS, TOOLS, describe, translate
from envs.crafter.world.rules import ACHIEVEMENTS, LENGTH
from envs.crafter.world.world import World
from envs.errors import ConfigError
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field

DEFAULT_TASK = "default"


class CrafterSettings(GameSettings):
    """Settings of Crafter."""

    balrog: ClassVar = {**GameSettings.balrog, "open_achievements_only": False, "max_steps": 2000}

    max_steps: int | None = Field(None, ge=1, le=LENGTH)
    """Steps after which an episode is truncated; null for 10,000, after which Crafter itself ends it."""
    open_achievements_only: bool = True
    """List only the achievements still to be reached in the prompt, instead of all 22."""
    reward: Literal["native", "achievements", "final"] = "native"
    """`native`: Crafter's own, 1 for new achievements and 0.1 per point of health won or lost. `achievements`: 1 for
    each new achievement. `final`: the number of achievements, paid at the end of the episode."""


class Crafter(TextGame):
    """One Crafter episode; it begins after an initial `Noop`, as in BALROG."""

    settings: CrafterSettings
    settings_model = CrafterSettings
    template_path = Path(__file__).with_name("prompt.j2")
    actions = ACTIONS
    default_action = "Noop"

    def __init__(self, task: str, seed: int, settings: CrafterSettings) -> None:
        if task != DEFAULT_TASK:
            raise ConfigError(f"Crafter has one task, {DEFAULT_TASK!r}; got {task!r}")
        super().__init__(settings)
        self.task, self.seed = task, seed
        self.max_steps = settings.max_steps or LENGTH
        self.steps = 0
        self.world: World

    def start(self) -> Frame:
        self.world = World(self.seed, images=bool(self.settings.vlm))
        self.world.step(self.default_action)
        self.steps = 0
        return self._frame()

    def play(self, action: str) -> Frame:
        unlocked = self.world.unlocked
        reward = self.world.step(action)
        self.steps += 1
        if self.world.unlocked != unlocked and self.settings.open_achievements_only:
            self.instruction_prompt = self.render_prompt()
        return self._frame(reward, len(self.world.unlocked) - len(unlocked))

    def translate(self, candidate: str) -> str | None:
        return translate(candidate, self.steps)

    def prompt_variables(self) -> dict[str, Any]:
        open_only = self.settings.open_achievements_only
        shown = [name for name in ACHIEVEMENTS if not (open_only and name in self.world.unlocked)]
        return {
            **super().prompt_variables(),
            "achievements": [name.replace("_", " ").title() for name in shown],
            "open_only": open_only,
            "tools": TOOLS,
        }

    def advice(self) -> str:
        """Return the next action of a scripted player, for demonstrations; it need not be followed."""
        return advise(self.world)

    def explain(self) -> str:
        """Return the reasoning behind `advice`."""
        return explain(self.world)

    def render(self) -> np.ndarray:
        """Draw what the player sees, as a uint8 array (252, 252, 3)."""
        return draw_clear(self.world)

    def _frame(self, reward: float = 0.0, new: int = 0) -> Frame:
        world = self.world
        long_term, short_term = describe(world)
        dead = world.player.health <= 0
        # The initial Noop counts towards Crafter's own limit, but not as one of the responses.
        late = self.steps >= self.max_steps or world.steps >= LENGTH
        reached = float(len(world.unlocked)) if dead or late else 0.0
        metrics = {f"achievement/{name}": float(name in world.unlocked) for name in ACHIEVEMENTS}
        paid = {"native": reward, "achievements": float(new), "final": reached}
        return Frame(
            long_term=long_term,
            short_term=short_term,
            reward=paid[self.settings.reward],
            terminated=dead,
            truncated=late and not dead,
            progression=len(world.unlocked) / len(ACHIEVEMENTS),
            image=draw(world) if self.settings.vlm else None,
            metrics={"achievements": float(len(world.unlocked)), **metrics},
        )


SETTINGS = CrafterSettings
build_env = Crafter.from_sample
expert_action = Crafter.advice
explain_action = Crafter.explain
