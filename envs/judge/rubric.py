"""What a judge is asked and how its verdict is read: criteria from a YAML, one JSON object back, nothing guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from envs.errors import ConfigError, JudgeError
from envs.options import read_options
from envs.text_game import render_template
from envs.tools.calls import decode, reasoning_end, short

_TEMPLATE = Path(__file__).with_name("prompt.j2")
FEEDBACK = "feedback"


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One thing that is scored."""

    name: str
    description: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == FEEDBACK:
            raise ConfigError(f"rubric.criteria: {self.name!r} must be a plain name, and not {FEEDBACK}")
        if self.weight <= 0:
            raise ConfigError(f"rubric.criteria: the weight of {self.name} must be above 0, got {self.weight}")


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """Criteria, the scale from worst to best, and what else the judge should know."""

    criteria: tuple[Criterion, ...]
    scale: tuple[float, ...] = (0.0, 10.0)
    instruction: str = "You judge the work of an agent."
    prompt_template: str | None = None

    def __post_init__(self) -> None:
        names = [criterion.name for criterion in self.criteria]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"rubric.criteria needs at least one, each with a name of its own, got {names}")
        if len(self.scale) != 2 or self.scale[0] >= self.scale[1]:
            raise ConfigError(f"rubric.scale must be [worst, best], got {list(self.scale)}")

    def system_prompt(self) -> str:
        """What the judge is told before it sees anything."""
        variables = {
            "instruction": self.instruction,
            "criteria": self.criteria,
            "worst": f"{self.scale[0]:g}",
            "best": f"{self.scale[1]:g}",
            "form": json.dumps({**{c.name: f"{self.scale[0]:g} to {self.scale[1]:g}" for c in self.criteria}})[:-1]
            + f', "{FEEDBACK}": "one or two sentences for the agent"}}',
        }
        return render_template(self.prompt_template or _TEMPLATE, variables)


@dataclass(frozen=True)
class Verdict:
    """`score` is 0 for the worst and 1 for the best; `scores` are the criteria's own, on the rubric's scale."""

    score: float
    scores: Mapping[str, float]
    feedback: str


def read_rubric(source: str | Mapping[str, Any]) -> Rubric:
    """A rubric from a YAML file or from the mapping that such a file holds.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown or impossible.
    """
    if isinstance(source, Mapping):
        return read_options(Rubric, source, "env.judge.rubric.")
    try:
        data = yaml.safe_load(Path(source).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"env.judge.rubric: {source} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.judge.rubric: {source} is not valid YAML: {error}") from error
    return read_options(Rubric, data, f"{source}: ")


def read_verdict(text: str, rubric: Rubric) -> Verdict:
    """The verdict that a judge wrote: a JSON object with a number for every criterion, and words.

    Reasoning before `</think>` and a code fence around the object are let pass; anything else is refused, because a
    verdict that is half guessed would be paid out as reward.

    Raises:
        JudgeError: it is no such object, or a number is missing or off the scale.
    """
    start = reasoning_end(text)
    body = "" if start is None else text[start:].strip()
    if body.startswith("```") and body.endswith("```") and "\n" in body:
        body = body[body.index("\n") : -3].strip()
    value, end, error = decode(body)
    if error or body[end:].strip():
        reason = error.removeprefix("the call is not ") or "something follows it"
        raise JudgeError(f"the verdict is not one JSON object ({reason}): {short(body)}")
    if not isinstance(value, dict):
        raise JudgeError(f"the verdict must be a JSON object, got {short(value)}")
    expected = {criterion.name for criterion in rubric.criteria} | {FEEDBACK}
    if set(value) != expected:
        raise JudgeError(f"the verdict must have the keys {', '.join(sorted(expected))}, got {short(sorted(value))}")
    words = value.pop(FEEDBACK)
    if not isinstance(words, str):
        raise JudgeError(f"the verdict's {FEEDBACK} must be a text, got {short(words)}")
    worst, best = rubric.scale
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not worst <= number <= best:
            raise JudgeError(f"the verdict's {name} must be a number from {worst:g} to {best:g}, got {short(number)}")
    weights = {criterion.name: criterion.weight for criterion in rubric.criteria}
    mean = sum(weights[name] * number for name, number in value.items()) / sum(weights.values())
    return Verdict((mean - worst) / (best - worst), {name: float(number) for name, number in value.items()}, words)
