"""The numbers of the report, from `measures.yaml`: what each means, its healthy range, and what to do outside of it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from slime_verlog import Settings


class Verdict(enum.StrEnum):
    """How a number or a question is judged, from best to worst."""

    NONE = "-"
    """Not judged: not measured, or only information."""
    GOOD = "good"
    """Within the healthy range."""
    LOOK = "look"
    """Read some episodes before you train."""
    ACT = "act"
    """Change something before you train."""


@dataclass(frozen=True)
class Value:
    """A measured number."""

    number: float | None
    """None if it could not be measured."""
    note: str = ""
    """Why it could not be measured, or a detail."""
    error: float | None = None
    """Standard error."""


class Measure(Settings):
    """One number of the report."""

    key: str
    question: int
    title: str
    good: float | None = None
    """The limit of the healthy range; None if the number is not judged."""
    act: float | None = None
    """The limit from which on something should change; None if there is none."""
    higher: bool = True
    """Whether higher is better."""
    percent: bool = True
    advice: str = ""
    """What to do outside of the healthy range."""

    def judge(self, value: Value) -> Verdict:
        """Compare with the healthy range."""
        if value.number is None or self.good is None:
            return Verdict.NONE
        sign = 1 if self.higher else -1
        if sign * value.number >= sign * self.good:
            return Verdict.GOOD
        return Verdict.ACT if self.act is not None and sign * value.number <= sign * self.act else Verdict.LOOK

    def show(self, number: float | None) -> str:
        """Return the number as text."""
        if number is None:
            return "-"
        return f"{100 * number:.1f} %" if self.percent else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"

    def healthy(self) -> str:
        """Return the healthy range as text."""
        if self.good is None:
            return ""
        return f"{'at least' if self.higher else 'at most'} {self.show(self.good)}" if self.good else "none"


class Question(Settings):
    """One of the four questions."""

    text: str
    headlines: tuple[str, ...]
    """Keys of the numbers that answer it if all are healthy."""


_DATA = yaml.safe_load(Path(__file__).with_name("measures.yaml").read_text(encoding="utf-8"))
QUESTIONS: Mapping[int, Question] = {number: Question(**question) for number, question in _DATA["questions"].items()}
MEASURES = tuple(Measure(key=key, **measure) for key, measure in _DATA["numbers"].items())
BY_KEY = {measure.key: measure for measure in MEASURES}
