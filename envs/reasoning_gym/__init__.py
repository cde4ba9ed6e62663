"""The generated questions of reasoning-gym: a task is the name of a generator, and the seed makes
the question.

The generator's own verifier scores the answer. Some give part of the reward for answers that are
close.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.errors import ConfigError, check_known
from envs.loading import import_extra
from envs.randomness import OwnRandomness
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field


class ReasoningGymSettings(GameSettings):
    """Settings of reasoning-gym's questions."""

    no_pictures = "reasoning-gym's questions have no pictures"

    level: int | None = Field(None, ge=0)
    """Difficulty from the generator's own curriculum, from 0 up to its highest; null for the
    generator's defaults."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the generator, such as {min_animals: 5}, which win over `level`."""
    answer_retries: int = Field(0, ge=0)
    """How often a wrong answer may be corrected. The reward is the score of the last answer."""


class ReasoningGym(TextGame):
    """One question. `entry` is reasoning-gym's own record of it."""

    settings: ReasoningGymSettings
    settings_model = ReasoningGymSettings
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = (
        "Answer in exactly this form:\n"
        "THINK: your reasoning, step by step\n"
        "ACTION: your final answer, and nothing else"
    )
    default_action = "no answer"

    def __init__(self, task: str, seed: int, settings: ReasoningGymSettings) -> None:
        super().__init__(settings)
        attempts = settings.answer_retries + 1
        self.task = task
        self.max_steps = min(settings.max_steps or attempts, attempts)
        self._random = OwnRandomness(seed)
        library = import_extra("reasoning_gym", "reasoning-gym", "reasoning-gym").factory
        with self._random.in_place():
            self._dataset = _make(library, task, seed, settings)
        self.entry: dict[str, Any] = {}

    def start(self) -> Frame:
        with self._random.in_place():
            self.entry = self._dataset[0]
        return Frame(str(self.entry["question"]))

    def translate(self, candidate: str) -> str | None:
        return candidate or None

    def play(self, action: str) -> Frame:
        score = 0.0
        metrics = {"verifier_failed": 0.0}
        with self._random.in_place():
            try:
                score = float(self._dataset.score_answer(action, self.entry))
            except Exception:
                # Several verifiers fail at an answer of another form, such as a word for a number.
                metrics["verifier_failed"] = 1.0
        right = score >= 1.0
        last = right or self._turns >= self.max_steps
        text = (
            "Your answer is right."
            if right
            else f"Your answer is not right. Its score is {score:.2f} of 1."
        )
        return Frame(
            text, "", score * last, last, progression=min(max(score, 0.0), 1.0), metrics=metrics
        )


SETTINGS = ReasoningGymSettings
DEFAULT_TASK = "leg_counting"
build_env = ReasoningGym.from_sample


def _make(library: ModuleType, task: str, seed: int, settings: ReasoningGymSettings) -> Any:
    """Make the generator of one question; raises ConfigError for an unknown one and refused
    options."""
    examples = f"there are {len(library.DATASETS)}, such as {DEFAULT_TASK}"
    check_known(task, library.DATASETS, f"reasoning-gym has no generator {task!r}", examples, n=1)
    kind, config_kind = library.DATASETS[task]
    if settings.level is not None and task not in library.CURRICULA:
        raise ConfigError(
            f"env.level: reasoning-gym has no levels for {task}; set env.options instead"
        )
    try:
        config = config_kind()
        if settings.level is not None:
            curriculum = library.CURRICULA[task]()
            curriculum.set_global_level(settings.level)
            config = curriculum.generate_configuration()
        return kind(config=dataclasses.replace(config, **settings.options, seed=seed, size=1))
    except (AssertionError, TypeError, ValueError) as error:
        known = ", ".join(field.name for field in dataclasses.fields(config_kind))
        refused = f"env.options: reasoning-gym's {task} refuses {dict(settings.options)}: {error}"
        raise ConfigError(f"{refused}; its options are {known}") from error
