"""The recall episode: one fact at the start, distractors, and a question about the fact every so
many turns.

Only a question accepts a colour as an answer. Otherwise a policy could repeat the colour as its
action in every turn, and a memory that shows actions alone would carry the fact.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.text_game import ANSWER_FORMAT, Frame, GameSettings, TextGame
from slime_verlog import Field

COLOURS = ("red", "green", "blue", "yellow")
TASK = "recall"


class RecallSettings(GameSettings):
    """Settings of the recall game."""

    no_pictures = "the recall game has no pictures"

    max_steps: int | None = Field(100, ge=1)
    """Turns of an episode; null for 100."""
    ask_every: int = Field(25, ge=2)
    """A question comes every so many turns; the last one after the last whole period."""

    @model_validator(mode="after")
    def _asks_at_least_once(self) -> Self:
        if self.ask_every > (self.max_steps or 100):
            raise ConfigError(
                f"env.ask_every: {self.ask_every} is more than env.max_steps: "
                f"{self.max_steps or 100}, so nothing would ever be asked; lower it"
            )
        return self


class Recall(TextGame):
    """One recall episode."""

    settings: RecallSettings
    settings_model = RecallSettings
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = ANSWER_FORMAT
    default_action = "next"

    def __init__(self, task: str, seed: int, settings: RecallSettings) -> None:
        super().__init__(settings)
        if task != TASK:
            raise ConfigError(f"task {task!r} is unknown; the only task of envs.recall is {TASK}")
        self.seed = seed
        self.max_steps = settings.max_steps or 100
        self.questions = self.max_steps // settings.ask_every
        self.actions = (self.default_action,)
        self.first = ""
        self.right = 0

    def start(self) -> Frame:
        self._random = random.Random(f"recall/{self.seed}")
        self.first = self._random.choice(COLOURS)
        self.right = 0
        return self._frame(0.0)

    def play(self, action: str) -> Frame:
        pays = action == self.first  # a colour is an action only where it was asked for
        self.right += pays
        return self._frame(float(pays))

    def translate(self, candidate: str) -> str | None:
        word = candidate.lower().strip(" .,!'\"`*[]")
        return word if word in self.actions else None

    def facts(self) -> Sequence[str]:
        return (self.first,)

    def advice(self) -> str:
        """Return the right action."""
        return self.first if self._asks else self.default_action

    def explain(self) -> str:
        """Return the reasoning behind `advice`; it repeats the fact, so that a window can carry
        it."""
        return f"The first light was {self.first}. I answer {self.advice()}."

    def prompt_variables(self) -> dict[str, Any]:
        return {
            **super().prompt_variables(),
            "colours": COLOURS,
            "ask_every": self.settings.ask_every,
        }

    @property
    def _asks(self) -> bool:
        return self._turns % self.settings.ask_every == self.settings.ask_every - 1

    def _frame(self, reward: float) -> Frame:
        over = self._turns >= self.max_steps
        self.actions = (
            (*COLOURS, self.default_action) if self._asks and not over else (self.default_action,)
        )
        if not self._turns:
            text = f"The first light is {self.first}."
        elif over:
            text = "The lights are off."
        elif self._asks:
            text = "Which colour did the first light have?"
        else:
            text = f"The light is {self._random.choice(COLOURS)}."
        progression = self.right / self.questions
        return Frame(
            text,
            reward=reward,
            terminated=over,
            progression=progression,
            metrics={"right": progression},
        )


SETTINGS = RecallSettings
DEFAULT_TASK = TASK
build_env = Recall.from_sample
expert_action = Recall.advice
explain_action = Recall.explain
