"""What a judge is asked, how its verdict is read, and all settings: a rubric in the YAML, one JSON
object in return."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from envs.calls import reasoning_end
from envs.errors import ConfigError, JudgeError
from envs.json_text import decode_whole, short
from envs.templates import render_template
from envs.tools.results import encodable
from slime_verlog import Field, Settings, read_settings, read_yaml

_TEMPLATE = Path(__file__).with_name("prompt.j2")
FEEDBACK = "feedback"
_OPENING = re.compile(r"[<\[](?=\S)|\](?=~)")
"""Start of a control token in known model families: `<|im_end|>`, `</s>`, `<｜User｜>`, `[INST]`,
`]~b]`."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Criterion(Settings):
    """One thing that the judge scores."""

    name: str
    """Key in the judge's verdict and in the metrics (`judge/<name>`)."""
    description: str
    """What the judge is told about it."""
    weight: float = Field(default=1.0, gt=0)
    """Weight in the mean of all scores."""

    @model_validator(mode="after")
    def _name_is_a_key(self) -> Self:
        if not self.name.isidentifier() or self.name == FEEDBACK:
            rule = f"a name has letters, digits and _ and is not {FEEDBACK}"
            raise ConfigError(f"rubric.criteria: {rule}, got {self.name!r}")
        return self


class Rubric(Settings):
    """What the judge is asked."""

    criteria: tuple[Criterion, ...]
    """At least one criterion, with different names."""
    scale: tuple[float, ...] = (0.0, 10.0)
    """The worst and the best score of a criterion."""
    instruction: str = "You judge the work of an agent."
    """First sentence of the judge's system message."""
    prompt_template: str | None = None
    """Jinja file that replaces the built-in system message."""

    @model_validator(mode="after")
    def _scorable(self) -> Self:
        names = [criterion.name for criterion in self.criteria]
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                "rubric.criteria must list at least one criterion, with different names, got "
                f"{names}"
            )
        if len(self.scale) != 2 or self.scale[0] >= self.scale[1]:
            raise ConfigError(f"rubric.scale must be [worst, best], got {list(self.scale)}")
        return self

    def system_prompt(self) -> str:
        """Return the judge's system message."""
        worst, best = (f"{score:g}" for score in self.scale)
        form = {criterion.name: f"{worst} to {best}" for criterion in self.criteria}
        form[FEEDBACK] = "one or two sentences for the agent"
        variables = {
            "instruction": self.instruction,
            "criteria": self.criteria,
            "worst": worst,
            "best": best,
            "form": json.dumps(form),
        }
        return render_template(self.prompt_template or _TEMPLATE, variables)


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one turn or episode."""

    score: float
    """Weighted mean of the scores, from 0 (worst) to 1 (best)."""
    scores: Mapping[str, float]
    """Score of each criterion, on the rubric's scale."""
    feedback: str


def read_rubric(path: str) -> Rubric:
    """Return the rubric in a YAML file; raises ConfigError for an unreadable file and wrong
    keys."""
    return read_settings(Rubric, read_yaml(path, "env.judge.rubric"), f"{path}: ")


def read_verdict(text: str, rubric: Rubric) -> Verdict:
    """Read a verdict: a JSON object with a number on the scale for every criterion, and feedback.

    Reasoning before `</think>` and a code fence around the object are accepted. Everything else
    raises JudgeError, because the verdict is paid as reward and must not be guessed.
    """
    start = reasoning_end(text)
    body = "" if start is None else text[start:].strip()
    if body.startswith("```") and body.endswith("```") and "\n" in body:
        body = body[body.index("\n") : -3].strip()
    value, error = decode_whole(body)
    if error:
        reason = error.removeprefix("the call is not ")
        raise JudgeError(f"the verdict is not one JSON object ({reason}): {short(body)}")
    if not isinstance(value, dict):
        raise JudgeError(f"the verdict must be a JSON object, got {short(value)}")
    expected = {criterion.name for criterion in rubric.criteria} | {FEEDBACK}
    if set(value) != expected:
        raise JudgeError(
            f"the verdict must have the keys {', '.join(sorted(expected))}, got "
            f"{short(sorted(value))}"
        )
    words = value.pop(FEEDBACK)
    if not isinstance(words, str):
        raise JudgeError(f"the verdict's {FEEDBACK} must be a text, got {short(words)}")
    worst, best = rubric.scale
    for name, number in value.items():
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not worst <= number <= best
        ):
            raise JudgeError(
                f"the verdict's {name} must be a number from {worst:g} to {best:g}, got "
                f"{short(number)}"
            )
    weights = {criterion.name: criterion.weight for criterion in rubric.criteria}
    total = sum(weights[name] * number for name, number in value.items())
    mean = total / sum(weights.values())
    scores = {name: float(number) for name, number in value.items()}
    return Verdict((mean - worst) / (best - worst), scores, words)


def quoted(value: Any) -> str:
    """Untrusted text for the judge as JSON. Inside its strings, `<` and `[` before other text are
    escaped.

    A server that receives messages as text applies its chat template to them, so `<|im_end|>`
    inside a response would end the message there. The OpenAI API cannot take tokens, so the text
    itself must not contain such strings.
    """
    written = encodable(json.dumps(value, ensure_ascii=False))
    return _STRING.sub(
        lambda string: _OPENING.sub(lambda c: f"\\u{ord(c.group()):04x}", string.group()), written
    )


def broken(text: str) -> str:
    """Return the text with a space after every character that may begin a control token."""
    return _OPENING.sub(lambda c: f"{c.group()} ", encodable(text))


class JudgeSettings(Settings):
    """The judge's server and model, the rubric, when the judge is asked, and how its verdict enters
    the reward."""

    url: str
    """Address of a server with OpenAI's chat API, as SGLang is: `http://host:port`, with or without
    `/v1`."""
    model: str = "default"
    """Model name in requests and in the cache, which needs another one than `default`."""
    api_key_env: str | None = None
    """Environment variable with the API key."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of one verdict, reasoning included."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds per attempt."""
    deadline_s: float = Field(default=50.0, gt=0)
    """Seconds for all attempts of one verdict together. Keep it below `env_step_timeout_s`."""
    max_retries: int = Field(default=4, ge=0)
    """Further attempts after a failed request or an unusable verdict."""
    cache: str | None = None
    """SQLite file that keeps verdicts, shared by all workers and runs. With it, a lost episode can
    be replayed."""
    rubric: Rubric | str = Field(union_mode="left_to_right")
    """What the judge scores, as a mapping or as the path of a YAML file that holds it."""
    when: Literal["end", "every"] = "end"
    """`end` judges the whole episode after its last turn; `every` judges each turn."""
    weight: float = 1.0
    """The verdict adds this number times its mean score, which is between 0 and 1, to the
    reward."""
    env_weight: float = 1.0
    """Factor on the environment's own reward."""
    feedback: bool = True
    """With `when: every`, show the judge's feedback with the next observation."""
    on_failure: Literal["fault", "zero"] = "fault"
    """Without a verdict, `fault` gives the episode up; `zero` counts the failure and adds no
    reward."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"env.judge.url must begin with http:// or https://, got {self.url!r}"
            )
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ConfigError(
                f"env.judge.api_key_env: the environment has no variable {self.api_key_env}"
            )
        if self.cache is not None and self.model == "default":
            raise ConfigError(
                f"env.judge.cache: set env.judge.model; {self.cache} keeps a model's verdicts by "
                "its name"
            )
        return self


class JudgedSettings(Settings):
    """The YAML's `env:` mapping."""

    inner: str
    """The environment to judge: a module or a `.py` file."""
    judge: JudgeSettings
    """The judge."""
    options: Mapping[str, Any] = {}
    """The `env:` mapping of the inner environment."""
