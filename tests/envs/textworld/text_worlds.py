"""Small gymnasium environments with text, for the tests of the adapter that wraps them."""

import enum
import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Moves(enum.IntEnum):
    step_back = 0
    step_ahead = 1
    wait = 2


class Corridor(gymnasium.Env):
    """A corridor with a door at a random place; the agent wins there, and falls off at the start.

    `shape` is how it shows its text: `plain`, `dict`, `balrog` (two parts) or `array` (no text at
    all).
    """

    actions = Moves
    action_space = spaces.Discrete(3)

    def __init__(
        self, shape: str = "plain", length: int = 8, render_mode: str | None = None
    ) -> None:
        self.shape, self.length, self.render_mode = shape, length, render_mode
        text = spaces.Text(200, charset=string.printable)
        self.observation_space = {
            "plain": text,
            "dict": spaces.Dict({"view": text, "clock": spaces.Discrete(100)}),
            "two_texts": spaces.Dict({"view": text, "sound": text}),
            "balrog": spaces.Dict(
                {"text": spaces.Dict({"long_term_context": text, "short_term_context": text})}
            ),
            "array": spaces.Box(0, length, (2,)),
        }[shape]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.place, self.clock = 1, 0
        self.door = int(self.np_random.integers(3, self.length))
        return self._show(), {"mission": f"reach door {self.door}"}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.clock += 1
        self.place += {Moves.step_ahead: 1, Moves.step_back: -1, Moves.wait: 0}[Moves(action)]
        won, lost = self.place == self.door, self.place == 0
        return self._show(), float(won) - float(lost), won or lost, self.clock >= 40, {}

    def render(self) -> np.ndarray:
        return np.zeros((4, self.length, 3), dtype=np.uint8)

    def _show(self) -> Any:
        text = f"you stand at {self.place} of {self.length}, the door is at {self.door}"
        return {
            "plain": text,
            "dict": {"view": text, "clock": self.clock},
            "two_texts": {"view": text, "sound": "silence"},
            "balrog": {
                "text": {"long_term_context": text, "short_term_context": f"turn {self.clock}"}
            },
            "array": np.array([self.place, self.door], dtype=np.float32),
        }[self.shape]


class Echo(gymnasium.Env):
    """Free text: says back what it heard; `end` wins."""

    observation_space = spaces.Text(10_000, charset=string.printable)
    action_space = spaces.Text(60, min_length=1, charset=string.ascii_lowercase + " ")
    default_action = "nothing"

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return f"number {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return f"you said: {action}", float(action == "end"), action == "end", False, {}


def describe_places(observation: np.ndarray) -> str:
    """Put the corridor's array into words."""
    return f"at {observation[0]:.0f}, door {observation[1]:.0f}"
