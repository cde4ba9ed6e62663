"""Wraps any environment so that a language model judges it: the score becomes reward, the comment feedback.

In the YAML: `env: {inner: envs.tools, options: {...}, judge: {url: ..., rubric: rubric.yaml}}`.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, text_of, timed
from envs.errors import EnvironmentFault, JudgeError
from envs.judge.client import JudgeClient
from envs.judge.rubric import JudgedSettings, JudgeSettings, Rubric, Verdict, quoted, read_rubric, read_verdict
from envs.loading import load_env_module
from envs.tools.results import clip, encodable
from slime_verlog import read_settings

SETTINGS = JudgedSettings
_DESCRIPTION = ("mission", "instruction_prompt", "answer_format", "actions", "default_action", "max_steps", "tools")


class JudgedEnv(BaseInteractionEnv):
    """The inner environment with the judge's reward, feedback and metrics added."""

    def __init__(self, inner: BaseInteractionEnv, settings: JudgeSettings, task: str = "") -> None:
        self.inner, self.settings, self._task = inner, settings, task
        self.rubric = settings.rubric if isinstance(settings.rubric, Rubric) else read_rubric(settings.rubric)
        self.client = JudgeClient(settings)
        self.deterministic = inner.deterministic and settings.cache is not None
        self._copy_description()
        self._turns: list[dict[str, Any]] = []
        self._failures = 0
        self._feedback = self._shown = ""

    def _copy_description(self) -> None:
        """Take over the attributes that describe the inner environment's task; they may change during an episode."""
        for name in _DESCRIPTION:
            setattr(self, name, getattr(self.inner, name))

    def reset(self) -> Observation:
        observation = self.inner.reset()
        self._copy_description()
        self._turns, self._failures, self._feedback = [], 0, ""
        self._shown = observation["obs_str"]
        return observation

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        inner, done, info = self.inner.step(response_text)
        observation: Observation = {**inner}
        self._copy_description()
        limit = self.settings.text_chars
        self._turns.append(
            {
                "shown": clip(self._shown, limit),
                "answer": clip(response_text, limit),
                "executed": clip(info["executed_action"], limit),
                "outcome": clip(observation["obs_str"], limit),
            }
        )
        self._shown = observation["obs_str"]
        reward, metrics, self._feedback = info["reward"] * self.settings.env_weight, dict(info.get("metrics") or {}), ""
        if done or self.settings.when == "every":
            verdict = self._verdict(done)
            if verdict is not None:
                reward += self.settings.weight * verdict.score
                metrics |= {"judge/score": verdict.score}
                metrics |= {f"judge/{name}": score for name, score in verdict.scores.items()}
                self._feedback = encodable(verdict.feedback) if self.settings.feedback and not done else ""
        metrics |= {"judge/failures": float(self._failures), "judge/retries": float(self.client.retried)}
        if self._feedback:
            said, text = self._said(), observation["text"]
            observation["obs_str"] += f"\n\n{said}"
            observation["text"] = {**text, "long_term_context": f"{text['long_term_context']}\n\n{said}"}
        return observation, done, {**info, "reward": float(reward), "metrics": metrics}

    def _verdict(self, done: bool) -> Verdict | None:
        """Return the verdict; without one, None or an EnvironmentFault, as `on_failure` says."""
        turns = self._turns[-self.settings.turns_shown :] if done else self._turns[-1:]
        question = {
            "task": self.mission or clip(self.instruction_prompt, self.settings.text_chars),
            "turns_left_out": len(self._turns) - len(turns),
            "turns": turns,
            "finished": done,
        }
        messages = [
            {"role": "system", "content": self.rubric.system_prompt()},
            # JSON quotes what the agent wrote, so it cannot pose as part of the question.
            {"role": "user", "content": quoted(question)},
        ]
        about = {"task": [self._task, self.mission, self.instruction_prompt], "rubric": self.rubric.model_dump()}
        try:
            with timed("judge"):
                return self.client.ask(messages, lambda text: read_verdict(text, self.rubric), about)
        except JudgeError as error:
            if self.settings.on_failure == "fault":
                raise EnvironmentFault(f"no verdict: {error}") from error
            self._failures += 1
            return None

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:
        """Return the inner environment's messages, and one more with the judge's feedback if they do not show it."""
        formatted = self.inner.format_observation(observation)
        messages = [formatted] if isinstance(formatted, Mapping) else list(formatted)
        if self._feedback and not any(self._said() in text_of(message) for message in messages):
            messages.append({"role": "user", "content": self._said()})
        return messages

    def _said(self) -> str:
        return f"A judge says: {self._feedback}"

    def close(self) -> None:
        self.inner.close()


def build_env(sample: Any, args: Any) -> JudgedEnv:
    """Return the judged environment of a sample; `sample` is passed on to the inner environment."""
    settings = read_settings(JudgedSettings, getattr(args, "env", None), "env.")
    inner_args = SimpleNamespace(env=dict(settings.options), max_turns=getattr(args, "max_turns", None))
    task = str((getattr(sample, "metadata", None) or {}).get("task", ""))
    return JudgedEnv(load_env_module(settings.inner).build_env(sample, inner_args), settings.judge, task)
