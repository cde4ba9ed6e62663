"""Crafter as a text game, in BALROG's words.

Text, rewards, progression and deaths equal BALROG's for the same seed and actions, nights included.
Running out of steps is `truncated` here, but `terminated` in BALROG. The world draws the random
numbers of BALROG's 256 x 256 images even if none is shown, so `vlm` does not change the game.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from envs.crafter.expert import SOURCE, decide, find_job
from envs.crafter.rules import ACHIEVEMENTS, KIND_NAMES
from envs.crafter.vocabulary import ACTIONS, TOOLS, describe, translate
from envs.crafter.world import LENGTH, World
from envs.errors import ConfigError
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field

DEFAULT_TASK = "default"


class CrafterSettings(GameSettings):
    """Settings of Crafter."""

    balrog: ClassVar = {**GameSettings.balrog, "open_achievements_only": False, "max_steps": 2000}

    max_steps: int | None = Field(None, ge=1, le=LENGTH)
    """Steps after which an episode is truncated; null for 10,000, after which Crafter itself ends
    it."""
    open_achievements_only: bool = True
    """List only the achievements still to be reached in the prompt, instead of all 22."""
    reward: Literal["native", "achievements", "final"] = "native"
    """`native`: Crafter's own, 1 for new achievements and 0.1 per point of health won or lost.
    `achievements`: 1 for each new achievement. `final`: the number of achievements, paid at the end
    of the episode."""


class Crafter(TextGame):
    """One Crafter episode; it begins after an initial `Noop`, as in BALROG."""

    settings: CrafterSettings
    settings_model = CrafterSettings
    template_path = Path(__file__).with_name("prompt.j2")
    actions = ACTIONS
    default_action = "Noop"
    max_steps = LENGTH

    def __init__(self, task: str, seed: int, settings: CrafterSettings) -> None:
        if task != DEFAULT_TASK:
            raise ConfigError(f"Crafter has one task, {DEFAULT_TASK!r}; got {task!r}")
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self.world: World

    def start(self) -> Frame:
        self.world = World(self.seed, images=bool(self.settings.vlm))
        self.world.play(self.default_action)
        return self._frame()

    def play(self, action: str) -> Frame:
        unlocked = self.world.unlocked
        reward = self.world.play(action)
        if self.world.unlocked != unlocked and self.settings.open_achievements_only:
            self.instruction_prompt = self.render_prompt()
        return self._frame(reward, len(self.world.unlocked) - len(unlocked))

    def _pay(self, reward: float, valid: bool) -> float:
        """Pay what `final` owes also if the last answer is invalid; its penalty is charged as
        well."""
        if valid or self.settings.reward != "final":
            return super()._pay(reward, valid)
        return super()._pay(reward, True) - self.settings.format_penalty

    def translate(self, candidate: str) -> str | None:
        return translate(candidate, self._turns - 1)

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
        """Return the next action of a scripted player, for demonstrations; it need not be
        followed."""
        return decide(self.world)[1]

    def explain(self) -> str:
        """Return the reasoning behind `advice`: the need, where the needed thing is, and what the
        action does."""
        goal, action = decide(self.world)
        need, sought = _need(self.world, goal)
        view, _ = describe(self.world)
        wanted = list(sought)
        seen = f"No {' or '.join(wanted)} is in sight." if wanted else ""
        for kind in reversed(wanted):
            if line := re.search(rf"^- ({kind} .*)", view, re.MULTILINE):
                seen = f"I see {line[1].replace('your', 'my')}."
        return " ".join(filter(None, (need, seen, f"So I choose {action}.")))

    def render(self) -> np.ndarray:
        """Draw what the player sees, as a uint8 array (252, 252, 3)."""
        return self.world.render_clear()

    def _frame(self, reward: float = 0.0, new: int = 0) -> Frame:
        world = self.world
        long_term, short_term = describe(world)
        dead = world.player.health <= 0
        # The initial Noop counts towards Crafter's own limit, but not as one of the responses.
        late = self._turns >= self.max_steps or world.steps >= LENGTH
        reached = float(len(world.unlocked))
        paid = {
            "native": reward,
            "achievements": float(new),
            "final": reached if dead or late else 0.0,
        }
        metrics = {"achievements": reached}
        for name in ACHIEVEMENTS:
            metrics[f"achievement/{name}"] = float(name in world.unlocked)
        return Frame(
            long_term=long_term,
            short_term=short_term,
            reward=paid[self.settings.reward],
            terminated=dead,
            truncated=late and not dead,
            progression=reached / len(ACHIEVEMENTS),
            image=world.image,
            metrics=metrics,
        )


SETTINGS = CrafterSettings
build_env = Crafter.from_sample
expert_action = Crafter.advice
explain_action = Crafter.explain


_NEEDS = {
    "sleep on": ("I am asleep until my energy is full.", ()),
    "fight": ("A foe stands next to me, so I fight.", ("zombie", "skeleton")),
    "drink": ("My drink is {drink} of 9, so I look for water.", ("water",)),
    "eat": ("My food is {food} of 9, so I look for something to eat.", ("plant", "cow")),
    "rest": ("My energy is {energy} of 9 and my health {health} of 9: I need a safe rest.", ()),
    "guard": ("Animals would eat my plant, so I fence it in with stones.", ("plant",)),
    "cow": ("I have not eaten a cow yet.", ("cow",)),
    "wood": ("I carry {wood} wood and will need more.", ("tree",)),
    "stone": ("I carry {stone} stone and will need more.", ("stone",)),
    "place stone": ("I have not placed a stone yet, and carry {stone}.", ()),
    "grow": ("I want to plant a sapling, which grows into food on grass.", ("grass",)),
    "diamond": ("With an iron pickaxe I can dig a diamond.", ("diamond",)),
    "zombie": ("I am healthy and have not defeated a zombie yet.", ("zombie",)),
    "skeleton": ("I am healthy and have not defeated a skeleton yet.", ("skeleton",)),
}
"""Sentence and sought kinds of each goal; the numbers are those of the inventory."""


def _need(world: World, goal: str | None) -> tuple[str, Iterable[str]]:
    amount = world.player.inventory
    job = find_job(world, goal) if goal in ("Wood", "Stone", "Iron") else None
    if job is None:
        sentence, sought = _NEEDS.get(goal or "", ("There is nothing left to do.", ()))
        return sentence.format(**amount), sought
    tool = job.making.name.replace("_", " ")
    if job.lacking is not None:
        purpose = f" and the {job.to_build[0].name} for it" if job.to_build else ""
        lacks = f"For a {tool}{purpose} I lack {job.lacking}; I have {amount[job.lacking]}."
        return lacks, (KIND_NAMES[SOURCE[job.lacking]],)
    stations = [KIND_NAMES[station] for station in sorted(job.making.nearby)]
    if job.to_build:
        return f"I have what a {tool} takes, but need a {job.to_build[0].name} first.", stations
    return f"I have what a {tool} takes; it is made beside a {' and a '.join(stations)}.", stations
