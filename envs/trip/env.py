"""The trip: the first turns decide what pays in the last ones, and only the way between them gets longer.

Every prompt says how many decisions were right so far, so neither a memory nor a guess is needed to know what the end
will pay. What remains is credit: a return must reach back over the whole way, through the noise of what the way pays.
After `umbrella_chain` of bsuite (Osband et al. 2020), with several decisions per episode.
"""

import random
from pathlib import Path

from envs.errors import ConfigError
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field

ITEMS = ("rope", "map", "tent", "lamp", "coat", "soap", "flute", "kite")
NOISE = 0.3
"""What a turn of the way pays or costs, at random."""
TASK = "trip"


class TripSettings(GameSettings):
    """Settings of the trip."""

    no_pictures = "the trip has no pictures"

    max_steps: int = Field(100, ge=2 * len(ITEMS))
    """Turns of an episode: eight to pack, eight at the end that pay, and the way between them."""


class Trip(TextGame):
    """One trip."""

    settings: TripSettings
    settings_model = TripSettings
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = "Answer:\nTHINK: your reasoning\nACTION: one allowed action"
    default_action = "walk"

    def __init__(self, task: str, seed: int, settings: TripSettings) -> None:
        super().__init__(settings)
        if task != TASK:
            raise ConfigError(f"task {task!r} is unknown; the only task of envs.trip is {TASK}")
        self.seed, self.max_steps = seed, settings.max_steps
        self.needed: list[bool] = []
        self.right: list[bool] = []
        """For each decision so far, whether it was right."""
        self.steps = 0

    @property
    def packs(self) -> bool:
        """Whether the next action decides about an item."""
        return self.steps < len(ITEMS)

    def start(self) -> Frame:
        self._random = random.Random(f"trip/{self.seed}")
        self.needed = [self._random.random() < 0.5 for _ in ITEMS]
        self.right, self.steps = [], 0
        return self._frame(0.0)

    def play(self, action: str) -> Frame:
        arrived = self.steps - (self.max_steps - len(ITEMS))
        if self.packs:
            self.right.append(action == self.advice())
            reward = 0.0
        elif arrived >= 0:
            reward = 1.0 if self.right[arrived] else -1.0
        else:
            reward = self._random.choice((NOISE, -NOISE))
        self.steps += 1
        return self._frame(reward)

    def translate(self, candidate: str) -> str | None:
        word = candidate.lower().strip(" .,!'\"`*[]")
        return word if word in self.actions else None

    def advice(self) -> str:
        """Return the right action."""
        return "walk" if not self.packs else "pack" if self.needed[self.steps] else "leave"

    def explain(self) -> str:
        """Return the reasoning behind `advice`."""
        reason = "I have packed." if not self.packs else "I need it." if self.needed[self.steps] else "I do not need it."
        return f"{reason} I {self.advice()}."

    def _frame(self, reward: float) -> Frame:
        over = self.steps >= self.max_steps
        self.actions = ("pack", "leave") if self.packs else ("walk",)
        # An invalid answer while packing leaves the item; it is right or wrong like any other.
        self.default_action = "leave" if self.packs else "walk"
        place = "You walk."
        if self.packs:
            place = f"You {'need' if self.needed[self.steps] else 'do not need'} the {ITEMS[self.steps]}."
        time = 10 * self.steps // self.max_steps
        text = f"{place} Time {time} of 10. Right: {sum(self.right)} of {len(self.right)}."
        progression = sum(self.right) / len(ITEMS)
        return Frame(text, reward=reward, terminated=over, progression=progression, metrics={"right": progression})


SETTINGS = TripSettings
DEFAULT_TASK = TASK
build_env = Trip.from_sample
expert_action = Trip.advice
explain_action = Trip.explain
