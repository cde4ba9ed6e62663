"""The tool environment: a question, tools, and a final answer that may be graded.

Invariants: any text is a legal answer. An answer with a call that cannot be read or does not fit
its schema runs nothing and costs the format penalty. An answer without calls is the final one. When
a call fails, its result is an error message and the failure is counted; a tool is a fault of the
environment only if it cannot begin the episode or raises `EnvironmentFault`.
"""

import copy
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.base import (
    PICTURE_PLACE,
    BaseInteractionEnv,
    Observation,
    StepInfo,
    interleave,
    read_env_settings,
)
from envs.calls import CLOSE, OPEN, Call, find_calls, reasoning_end
from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError, ToolError
from envs.json_text import short
from envs.questions import Question, read_question
from envs.questions.grading import GRADERS, find_answer, load_grader
from envs.templates import render_template
from envs.tools.execution import ToolTimeout
from envs.tools.registry import load_tools, select_tools
from envs.tools.results import ToolEpisode, ToolResult, ToolSpec, encodable, finite
from envs.tools.session import ToolSession
from envs.tools.settings import ToolSettings

SETTINGS = ToolSettings
_TEMPLATE = Path(__file__).with_name("prompt.j2")
_RIGHT = "Your answer is right."
_WRONG = "Your answer is wrong."
_AGAIN = "Look for the mistake and answer again; do not repeat the answer."
_LAST_TURN = "One turn is left: give your final answer now."
_NO_ANSWER = "There is neither a call nor an answer after the reasoning."


@dataclass(frozen=True)
class _Outcome:
    """What one response did."""

    results: tuple[tuple[Call, ToolResult], ...] = ()
    """Calls and their results, in order."""
    feedback: str = ""
    reward: float = 0.0
    valid: bool = True
    ended: bool = False
    executed: str = ""
    span: tuple[int, int] | None = None


class ToolEnv(BaseInteractionEnv):
    """One question and its tools. Stateful tools live until the end of the episode.

    `specs` are the tools on offer, of which `Question.tools` may choose some. The metrics of a step
    are the episode's totals so far.
    """

    default_action = "nothing"

    def __init__(
        self,
        question: Question,
        specs: Sequence[ToolSpec],
        settings: ToolSettings,
        task: str = "sample",
        seed: int = 0,
    ) -> None:
        self.question = question
        self.settings = settings
        self.task = task
        self.seed = seed
        self.mission = question.text
        self.max_steps = settings.max_steps
        self.offered = select_tools(specs, question.tools)
        self.deterministic = settings.deterministic and all(
            spec.deterministic for spec in self.offered
        )
        self.tools = (
            tuple(spec.schema for spec in self.offered) if settings.tools_in == "template" else ()
        )
        self._grade = load_grader(settings.grader) if settings.grader else None
        if settings.grader in GRADERS and question.answer is None:
            raise ConfigError(
                f"env.grader {settings.grader} needs an answer to compare with: set "
                "env.answer_key, or --label-key for slime's own data set"
            )
        self._session = ToolSession(self.offered, settings)
        self._running = False

    def reset(self) -> Observation:
        self.close()
        self._steps = self._wrong = 0
        self._score = self._earned = 0.0
        self._totals: Counter[str] = Counter()
        question = self.question
        settings = self.settings
        in_prompt = self.offered if settings.tools_in == "prompt" else ()
        variables = {
            "instruction": question.system or settings.instruction or "",
            "tools": [
                json.dumps(spec.schema["function"], ensure_ascii=False) for spec in in_prompt
            ],
            "has_tools": bool(self.offered),
            "boxed": settings.grader == "math",
            "retries": settings.answer_retries,
            "max_calls": settings.max_calls,
            "max_steps": settings.max_steps,
        }
        self.instruction_prompt = render_template(settings.prompt_template or _TEMPLATE, variables)
        episode = ToolEpisode(
            self.task,
            self.seed,
            question.text,
            copy.deepcopy(question.answer),
            question.images,
            copy.deepcopy(question.metadata),
        )
        self._session = ToolSession(self.offered, settings)
        greetings = self._session.create(episode)
        self._running = True
        greeted = "".join(f"\n\n{result.text}" for result in greetings if result.text)
        shown = [image for result in greetings for image in result.images]
        self._images = [*question.images, *shown]
        pieces = [*[""] * len(self._images), question.text]
        if question.pieces:  # the images of tools follow those between the texts
            pieces = [*question.pieces, *[""] * len(shown)]
        pieces[-1] += greeted
        pieces = [piece.replace(PICTURE_PLACE, "") for piece in pieces]
        content = interleave(pieces, self._images) if self._images else pieces[-1]
        self._messages = [{"role": "user", "content": content}]
        self._text = (PICTURE_PLACE if question.pieces else "").join(pieces)
        return self._observe("", [], obs_str=question.text + greeted)

    def call_once(self, call: Call) -> ToolResult:
        """Run a checked call outside of a turn; raises EnvironmentFault if the machine is
        broken."""
        return self._session.run(call, time.monotonic() + self.settings.turn_timeout_s)

    @property
    def grades(self) -> bool:
        """Whether there is a grader for final answers."""
        return self._grade is not None

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if not self._running:
            raise EpisodeOverError(
                "step was called before reset or after the episode's end; call reset first"
            )
        self._steps += 1
        try:
            outcome = self._take(response_text, time.monotonic() + self.settings.turn_timeout_s)
        except EnvironmentFault:
            self.close()  # the episode is given up or built anew, so what its tools hold is not needed any more
            raise
        truncated = self._steps >= self.max_steps and not outcome.ended
        if self._steps == self.max_steps - 1 and not outcome.ended:
            outcome = replace(outcome, feedback=f"{outcome.feedback} {_LAST_TURN}".strip())
        earned = 0.0
        if outcome.ended or truncated:
            earned = self._session.reward()
            self.close()
        info = self._info(outcome, earned, truncated)
        info["action"] = response_text[slice(*outcome.span)] if outcome.span is not None else None
        self._messages = self._as_messages(outcome)
        shown = [f"{call.name}: {result.text}" for call, result in outcome.results]
        if outcome.feedback:
            shown.append(outcome.feedback)
        images = [image for _, result in outcome.results for image in result.images]
        return self._observe("\n\n".join(shown), images), not self._running, info

    def close(self) -> None:
        self._running = False
        self._session.release()

    def _take(self, text: str, deadline: float) -> _Outcome:
        found = find_calls(text, self.settings.max_calls, self.call_form)
        if found.span is None or not self.offered:
            return self._final(text)
        calls, errors = self._session.check(found)
        if errors:
            return self._invalid("No tool was run: " + "; ".join(errors) + ".")
        results = []
        executed = []
        for call in calls:
            results.append((call, self._session.run(call, deadline)))
            body = json.dumps(
                {"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False
            )
            executed.append(f"{OPEN}\n{body}\n{CLOSE}")
        return _Outcome(
            results=tuple(results),
            reward=sum(result.reward for _, result in results),
            ended=self.over(),
            executed="\n".join(executed),
            span=found.span,
        )

    def over(self) -> bool:
        """Return whether the episode ended with the calls of this turn; subclasses may have other
        endings."""
        return False

    def _invalid(self, feedback: str) -> _Outcome:
        return _Outcome(
            feedback=encodable(feedback), valid=False, reward=-self.settings.format_penalty
        )

    def _final(self, text: str) -> _Outcome:
        start = reasoning_end(text, self.call_form)
        answer, span = ("", (0, 0)) if start is None else find_answer(text, start)
        if not answer:
            return self._invalid(_NO_ANSWER)
        score, words = self.score(answer)
        self._score = max(self._score, min(score, 1.0))
        last = self._wrong >= self.settings.answer_retries or self._steps >= self.max_steps
        ended = last or self._grade is None or score >= 1.0
        self._wrong += 1
        if self._grade is not None and not words:
            words = _RIGHT if score >= 1.0 else _WRONG if ended else f"{_WRONG} {_AGAIN}"
        return _Outcome(
            (), encodable(words), score if ended else 0.0, ended=ended, executed=answer, span=span
        )

    def score(self, answer: str) -> tuple[float, str]:
        """Return the score and feedback for an answer; 0 and no feedback if the grader does not end
        in time.

        Raises:
            EnvironmentFault: the grader raised, or returned something other than a score.
        """
        if self._grade is None:
            return 0.0, ""
        arguments = {"answer": answer, "question": self.question}
        try:
            value = self._session.place.run(
                "grader", self._grade, arguments, self.settings.turn_timeout_s
            )
        except ToolTimeout:
            self._session.counts["grader_timeouts"] += 1
            return 0.0, ""
        except ToolError as error:
            raise EnvironmentFault(f"env.grader {self.settings.grader} raised {error}") from error
        score, words = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
        try:
            return finite(score, "score"), str(words or "")
        except ToolError as error:
            name = self.settings.grader
            wrong = f"env.grader {name} returned {short(value)}, not a number or (number, text)"
            raise EnvironmentFault(wrong) from error

    def _info(self, outcome: _Outcome, earned: float, truncated: bool) -> StepInfo:
        self._earned += earned + sum(result.reward for _, result in outcome.results)
        progression = self._score if self._grade is not None else self._earned
        self._totals["tool_calls"] += len(outcome.results)
        for call, result in outcome.results:
            self._totals.update(
                {f"{call.name}/{key}": number for key, number in result.metrics.items()}
            )
        return {
            "reward": float(outcome.reward + earned),
            "terminated": outcome.ended,
            "truncated": truncated,
            "valid_action": outcome.valid,
            "executed_action": outcome.executed if outcome.valid else self.default_action,
            "progression": float(min(max(progression, 0.0), 1.0)),
            "action_span": outcome.span if outcome.valid else None,
            "metrics": {
                key: float(number)
                for key, number in {**self._totals, **self._session.counts}.items()
            },
        }

    def _observe(self, shown: str, images: list[Any], obs_str: str | None = None) -> Observation:
        """Show the question as short-term text, so that a window shows it exactly once."""
        observation: Observation = {
            "obs_str": shown if obs_str is None else obs_str,
            "text": {"long_term_context": shown, "short_term_context": self._text},
        }
        if images or self._images:
            observation["multi_modal_data"] = {"image": images, "current_image": list(self._images)}
        return observation

    def _as_messages(self, outcome: _Outcome) -> list[dict[str, Any]]:
        """Return one message per result, as chat templates expect, then the environment's
        feedback."""
        messages = []
        for number, (call, result) in enumerate(outcome.results):
            if self.settings.tools_in == "prompt":
                messages.append(
                    _message("user", f"Result of {call.name}:\n{result.text}", result.images)
                )
                continue
            message = _message("tool", result.text, result.images)
            # Mistral's template needs an id of nine characters; most other templates ignore it.
            message["tool_call_id"] = (
                call.identity or f"call{self._steps % 1000:03d}{number % 100:02d}"
            )
            messages.append(message)
        if outcome.feedback or not messages:
            messages.append(_message("user", outcome.feedback, ()))
        return messages

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:
        """Return the messages of the latest observation, for a history that already shows the
        question."""
        return self._messages


def _message(role: str, text: str, images: Sequence[Any]) -> dict[str, Any]:
    parts = [
        *({"type": "image", "image": image} for image in images),
        {"type": "text", "text": text},
    ]
    return {"role": role, "content": parts if images else text}


def build_env(sample: Any, args: Any) -> ToolEnv:
    """Return the environment of one question; a sample of slime's own data set needs neither task
    nor seed."""
    settings = read_env_settings(ToolSettings, args)
    question, task, seed = read_question(sample, settings)
    return ToolEnv(question, load_tools(settings.tools), settings, task, seed)
