"""BabaIsAI as a text game, without the original package: BALROG's 40 tasks from a generator of their own.

Text, rewards and endings equal BALROG's for the same seed and actions. Two things differ on purpose: when no YOU
rule is left, BALROG prints a Python object where this game says so in a sentence and shows the level that takes
the old one's place; and the 100th step is `truncated` unless `time_limit: terminated` asks for BALROG's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs.babaisai_world.levels import Level, make_level
from envs.babaisai_world.observation import YOU_BROKEN, describe
from envs.babaisai_world.picture import draw_world
from envs.babaisai_world.planner import find_plan
from envs.babaisai_world.rules import Cell
from envs.babaisai_world.tasks import find_task
from envs.babaisai_world.thoughts import explain_plan
from envs.babaisai_world.world import DIRECTIONS
from envs.base import describe_task
from envs.text_game import ANSWER_FORMAT, Frame, GameOptions, TextGame, read_game_options

ACTIONS = {
    "idle": "stay where you are for this turn",
    "up": "go one step up",
    "right": "go one step to the right",
    "down": "go one step down",
    "left": "go one step to the left",
}
PRESETS = {
    "verlog": {"binary_reward": True, "format_penalty": 0.1, "time_limit": "truncated"},
    "balrog": {"binary_reward": False, "format_penalty": 0.0, "time_limit": "terminated"},
}
_MAX_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class BabaIsAIOptions(GameOptions):
    """`time_limit`: what running out of steps is called; BALROG's wrapper cannot tell it from losing."""

    time_limit: Literal["truncated", "terminated"] = "truncated"


def build_env(sample: Any, args: Any) -> BabaIsAI:
    """Make the environment of `sample.metadata`'s task and seed with the options in `args.env`.

    Raises:
        ConfigError: unknown task (with the nearest names) or option.
    """
    task, seed = describe_task(sample)
    return BabaIsAI(task, seed, read_game_options(BabaIsAIOptions, args, PRESETS))


def expert_action(env: BabaIsAI) -> str:
    """Return the action that a scripted player takes next in a running episode, for demonstrations.

    It plans from the world as it is, so its advice may be taken or not; where it finds no way to win it idles.
    """
    return env.advice()


def explain_action(env: BabaIsAI) -> str:
    """Return the thought behind `expert_action(env)`."""
    return env.explain()


class BabaIsAI(TextGame):
    """One BabaIsAI episode: the level that the seed draws, and the next ones where a YOU rule is broken."""

    template_path = Path(__file__).with_suffix(".j2")
    answer_format = ANSWER_FORMAT.replace("one allowed action", f"one of {', '.join(ACTIONS)}")
    actions = ACTIONS
    default_action = "idle"

    def __init__(self, task: str, seed: int, options: BabaIsAIOptions) -> None:
        super().__init__(options)
        self.task, self.seed = task, seed
        self.max_steps = options.max_steps or _MAX_STEPS
        self._task = find_task(task)
        self._rng = np.random.RandomState(0)
        self._text = ""
        self._plans: dict[tuple[Cell, ...], list[str]] = {}
        self.level: Level
        self.steps = self._whole_way = 0

    def start(self) -> Frame:
        # NumPy's legacy generator is seeded with 32 bits.
        self._rng = np.random.RandomState(self.seed % 2**32)
        self._next_level()
        return self._frame(self._text)

    def play(self, action: str) -> Frame:
        self.steps += 1
        won = lost = broken = False
        if action in DIRECTIONS:
            won, lost = self.level.world.step(action)
            broken = not self._look()
        reward = 1 - 0.9 * (self.steps / self.max_steps) if won else -1.0 if lost else 0.0
        late = self.steps >= self.max_steps and not (won or lost)
        if broken:
            self._next_level()
        terminates = late and self.options.time_limit == "terminated"
        return self._frame(
            f"{YOU_BROKEN}\n\n{self._text}" if broken else self._text,
            reward=reward,
            terminated=won or lost or terminates,
            truncated=late and not terminates,
            progression=float(won),
            metrics={"you_rule_broken": float(broken)},
        )

    def translate(self, candidate: str) -> str | None:
        words = candidate.lower().replace("_", " ")
        return words if words in ACTIONS else None

    def advice(self) -> str:
        """Return the action that a search for a winning plan recommends now; the default where it finds none."""
        plan = self._plan()
        return plan[0] if plan else self.default_action

    def explain(self) -> str:
        """Return the thought behind `advice`: what wins, where it is seen, and what the next push is for."""
        return explain_plan(self.level.world, self._text, self._plan())

    def distance_left(self) -> float:
        """Moves of the plan from here, of those from the level's start; 1 where the search finds no way."""
        plan = self._plan()
        if not self._whole_way:
            self._whole_way = max(1, len(plan))
        return len(plan) / self._whole_way if plan else 1.0

    def _plan(self) -> list[str]:
        """Moves that win from here; kept, and so is the rest for the state after the first of them."""
        world = self.level.world
        here = tuple(world.cells)
        if here not in self._plans:
            self._plans[here] = find_plan(world) or []
        plan = self._plans[here]
        if plan:
            after = world.copy()
            after.step(plan[0])
            self._plans[tuple(after.cells)] = plan[1:]
        return plan

    def _next_level(self) -> None:
        """Go on to the generator's next level; its steps are counted from zero, as BALROG counts them."""
        self.level = make_level(self._task, self._rng)
        self.steps = self._whole_way = 0
        self._plans.clear()
        if not self._look():
            raise RuntimeError(f"BabaIsAI task {self.task!r}, seed {self.seed}: drew a level in which nothing is YOU")

    def _look(self) -> bool:
        """Put the world into words; False, and nothing said, if no YOU thing is in sight."""
        speaker = self.level.world.find_speaker()
        if speaker is not None:
            self._text = describe(self.level.world, speaker)
        return speaker is not None

    def _frame(self, text: str, **outcome: Any) -> Frame:
        image = draw_world(self.level.world) if self.options.vlm else None
        return Frame(long_term=text, image=image, **outcome)
