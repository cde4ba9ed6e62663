"""A wrapper around any environment that lets a language model judge: its score becomes reward, its words feedback.

In the YAML: `env: {inner: envs.tools, options: {...}, judge: {url: ..., rubric: rubric.yaml}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from envs.base import BaseInteractionEnv, Observation, StepInfo
from envs.errors import ConfigError, EnvironmentFault, JudgeError
from envs.judge.client import EndpointOptions, JudgeClient
from envs.judge.material import quoted
from envs.judge.rubric import Verdict, read_rubric, read_verdict
from envs.loading import load_env_module
from envs.options import read_options
from envs.tools.results import clip, encodable


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(EndpointOptions):
    """The endpoint, what is asked, when, and what the verdict is worth."""

    rubric: str | Mapping[str, Any]
    """YAML file or mapping; see `rubric.Rubric`."""
    when: Literal["end", "every"] = "end"
    """Judge the whole episode at its end, or every turn."""
    weight: float = 1.0
    """Reward of the best possible verdict."""
    env_weight: float = 1.0
    """What the environment's own reward is multiplied with."""
    feedback: bool = True
    """Show the judge's words with the next observation (`when: every`)."""
    on_failure: Literal["fault", "zero"] = "fault"
    """Without a verdict: give the episode up, or count it and pay nothing for the judge."""
    turns_shown: int = 16
    """Most recent turns that the judge sees."""
    text_chars: int = 4000
    """Most characters of each observation and answer that the judge sees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns_shown < 1 or self.text_chars < 100:
            raise ConfigError("env.judge: turns_shown must be at least 1 and text_chars at least 100")


@dataclass(frozen=True, kw_only=True)
class JudgedOptions:
    """The YAML's `env:` mapping."""

    inner: str
    """Environment that is judged: a module or a `.py` file."""
    judge: JudgeOptions
    options: Mapping[str, Any] = field(default_factory=dict)
    """The inner environment's own options."""


class JudgedEnv(BaseInteractionEnv):
    """Plays the inner environment; everything but reward, feedback and metrics is its own."""

    def __init__(self, inner: BaseInteractionEnv, options: JudgeOptions, task: str = "") -> None:
        self.inner, self.options, self._task = inner, options, task
        self.rubric = read_rubric(options.rubric)
        self.client = JudgeClient(options)
        self._turns: list[dict[str, Any]] = []
        self._failures = 0
        self._words = ""

    mission = property(lambda self: self.inner.mission)
    instruction_prompt = property(lambda self: self.inner.instruction_prompt)
    answer_format = property(lambda self: self.inner.answer_format)
    actions = property(lambda self: self.inner.actions)
    default_action = property(lambda self: self.inner.default_action)
    max_steps = property(lambda self: self.inner.max_steps)
    tools = property(lambda self: self.inner.tools)

    @property
    def deterministic(self) -> bool:
        """A replay gets the same verdicts only where they are kept."""
        return self.inner.deterministic and self.options.cache is not None

    def reset(self) -> Observation:
        observation = self.inner.reset()
        self._turns, self._failures, self._words = [], 0, ""
        self._shown = observation["obs_str"]
        return observation

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        observation, done, info = self.inner.step(response_text)
        limit = self.options.text_chars
        self._turns.append(
            {
                "shown": clip(self._shown, limit),
                "answer": clip(response_text, limit),
                "executed": clip(info["executed_action"], limit),
                "outcome": clip(observation["obs_str"], limit),
            }
        )
        self._shown = observation["obs_str"]
        reward, metrics, self._words = info["reward"] * self.options.env_weight, dict(info.get("metrics") or {}), ""
        if done or self.options.when == "every":
            verdict = self._verdict(done)
            if verdict is not None:
                reward += self.options.weight * verdict.score
                metrics |= {"judge/score": verdict.score}
                metrics |= {f"judge/{name}": score for name, score in verdict.scores.items()}
                self._words = encodable(verdict.feedback) if self.options.feedback and not done else ""
        metrics |= {"judge/failures": float(self._failures), "judge/retries": float(self.client.retried)}
        return self._with_words(observation), done, {**info, "reward": float(reward), "metrics": metrics}

    def _verdict(self, done: bool) -> Verdict | None:
        """The judge's verdict; None where there is none and the options let that pass.

        Raises:
            EnvironmentFault: there is none, and they do not.
        """
        turns = self._turns[-self.options.turns_shown :] if done else self._turns[-1:]
        material = {
            "task": self.mission or clip(self.instruction_prompt, self.options.text_chars),
            "turns_left_out": len(self._turns) - len(turns),
            "turns": turns,
            "finished": done,
        }
        messages = [
            {"role": "system", "content": self.rubric.system_prompt()},
            # JSON quotes whatever the agent wrote, so none of it can pose as a part of the question.
            {"role": "user", "content": quoted(material)},
        ]
        about = {"task": [self._task, self.mission, self.instruction_prompt], "rubric": asdict(self.rubric)}
        try:
            return self.client.ask(messages, lambda text: read_verdict(text, self.rubric), about)
        except JudgeError as error:
            if self.options.on_failure == "fault":
                raise EnvironmentFault(f"no verdict: {error}") from error
            self._failures += 1
            return None

    def _with_words(self, observation: Observation) -> Observation:
        if not self._words:
            return observation
        said, text = self._said(), observation["text"]
        return {
            **observation,
            "obs_str": f"{observation['obs_str']}\n\n{said}",
            "text": {**text, "long_term_context": f"{text['long_term_context']}\n\n{said}"},
        }

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:
        """The inner environment's messages; where they do not show the judge's words, those are one more."""
        formatted = self.inner.format_observation(observation)
        messages = [formatted] if isinstance(formatted, Mapping) else list(formatted)
        if self._words and not any(self._said() in _text_of(message) for message in messages):
            messages.append({"role": "user", "content": self._said()})
        return messages

    def _said(self) -> str:
        return f"A judge says: {self._words}"

    def close(self) -> None:
        self.inner.close()


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def build_env(sample: Any, args: Any) -> JudgedEnv:
    """The judged environment of a sample; `sample` reaches the inner environment as it is.

    Raises:
        ConfigError: a bad option of the wrapper, the rubric or the inner environment.
    """
    options = read_options(JudgedOptions, dict(getattr(args, "env", None) or {}), "env.")
    inner_args = SimpleNamespace(env=dict(options.options), max_turns=getattr(args, "max_turns", None))
    task = str((getattr(sample, "metadata", None) or {}).get("task", ""))
    return JudgedEnv(load_env_module(options.inner).build_env(sample, inner_args), options.judge, task)
