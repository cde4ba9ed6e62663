"""Crafter as a text game: BALROG's words, all 22 achievements, no picture unless `vlm: true` asks for one.

Text, rewards, progression and deaths equal BALROG's for the same seed and actions, nights included. Running out of
steps is `truncated` here; BALROG's wrapper calls it the same as dying. The world draws the random numbers of
BALROG's pictures, 256 x 256, whether one is shown or not, so `vlm` changes nothing in the game.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envs.base import describe_task, make_image
from envs.crafter_world.expert import advise
from envs.crafter_world.observation import describe
from envs.crafter_world.rules import ACHIEVEMENTS, LENGTH
from envs.crafter_world.thoughts import explain
from envs.crafter_world.vocabulary import ACTIONS, TOOLS, translate
from envs.crafter_world.world import World
from envs.errors import ConfigError
from envs.text_game import Frame, GameOptions, TextGame, read_game_options

TASK = "default"
PRESETS = {
    "verlog": {"binary_reward": False, "format_penalty": 0.1, "open_achievements_only": True},
    "balrog": {"binary_reward": False, "format_penalty": 0.0, "open_achievements_only": False, "max_steps": 2000},
}


@dataclass(frozen=True, kw_only=True)
class CrafterOptions(GameOptions):
    """`open_achievements_only`: the prompt lists what is still to be achieved instead of all 22.

    `reward`: Crafter's own (`native`: 1 for new achievements, 0.1 a point of health won or lost), 1 for each
    achievement as it comes (`achievements`), or all of them at the episode's end (`final`).
    """

    open_achievements_only: bool = True
    reward: Literal["native", "achievements", "final"] = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps is not None and self.max_steps > LENGTH:
            raise ConfigError(f"env.max_steps must be at most {LENGTH}, where Crafter ends, got {self.max_steps}")


def build_env(sample: Any, args: Any) -> Crafter:
    """Make the environment of `sample.metadata`'s task and seed with the options in `args.env`.

    Raises:
        ConfigError: unknown task or option.
    """
    task, seed = describe_task(sample)
    if task != TASK:
        raise ConfigError(f"Crafter has one task, {TASK!r}; got {task!r}")
    return Crafter(task, seed, read_game_options(CrafterOptions, args, PRESETS))


def expert_action(env: Crafter) -> str:
    """Return the action that a scripted player takes next in a running episode, for demonstrations.

    It decides from the world as it is, so its advice may be taken or not.
    """
    return advise(env.world)


def explain_action(env: Crafter) -> str:
    """Return the thought behind `expert_action(env)`."""
    return explain(env.world)


class Crafter(TextGame):
    """One Crafter episode; it begins after a first `Noop` of its own, as BALROG's do."""

    template_path = Path(__file__).with_suffix(".j2")
    actions = ACTIONS
    default_action = "Noop"

    def __init__(self, task: str, seed: int, options: CrafterOptions) -> None:
        super().__init__(options)
        self.options: CrafterOptions = options
        self.task, self.seed = task, seed
        self.max_steps = options.max_steps or LENGTH
        self.steps = 0
        self.world: World

    def start(self) -> Frame:
        self.world = World(self.seed, pictures=self.options.vlm)
        self.world.step(self.default_action)
        self.steps = 0
        return self._frame()

    def play(self, action: str) -> Frame:
        unlocked = self.world.unlocked
        reward = self.world.step(action)
        self.steps += 1
        if self.world.unlocked != unlocked and self.options.open_achievements_only:
            self.instruction_prompt = self.render_prompt()
        return self._frame(reward, len(self.world.unlocked) - len(unlocked))

    def translate(self, candidate: str) -> str | None:
        return translate(candidate, self.steps)

    def prompt_variables(self) -> dict[str, Any]:
        open_only = self.options.open_achievements_only
        shown = [name for name in ACHIEVEMENTS if not (open_only and name in self.world.unlocked)]
        return {
            **super().prompt_variables(),
            "achievements": [name.replace("_", " ").title() for name in shown],
            "open_only": open_only,
            "tools": TOOLS,
        }

    def _frame(self, reward: float = 0.0, new: int = 0) -> Frame:
        world = self.world
        long_term, short_term = describe(world)
        dead = world.player.health <= 0
        # The first Noop counts in Crafter's own length, but not among the answers.
        late = self.steps >= self.max_steps or world.steps >= LENGTH
        reached = float(len(world.unlocked)) if dead or late else 0.0
        paid = {"native": reward, "achievements": float(new), "final": reached}
        return Frame(
            long_term=long_term,
            short_term=short_term,
            reward=paid[self.options.reward],
            terminated=dead,
            truncated=late and not dead,
            progression=len(world.unlocked) / len(ACHIEVEMENTS),
            image=self._draw() if self.options.vlm else None,
            metrics=_count(world.unlocked),
        )

    def _draw(self) -> Any:
        from envs.crafter_world.picture import draw

        return make_image(draw(self.world))


def _count(unlocked: frozenset[str]) -> dict[str, float]:
    """Return 0 or 1 for every achievement, and how many were reached."""
    metrics = {f"achievement/{name}": float(name in unlocked) for name in ACHIEVEMENTS}
    return {"achievements": float(len(unlocked)), **metrics}
