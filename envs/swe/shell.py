"""Base of environments in which the model works on files with tools in a sandbox, and is judged at
the end.

Invariants: any text is a legal response. Nothing that the agent does reaches the machine outside
its sandbox. The reward comes from `judge_files` alone, once, after the agent's last command.
"""

import abc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from envs.base import BaseInteractionEnv, Observation, StepInfo, make_observation, timed
from envs.errors import EpisodeOverError
from envs.swe.tools import (
    TOOLS,
    Call,
    ShellTool,
    Workbench,
    execute,
    execute_all,
    harmless,
    parse_response,
)
from envs.templates import render_template
from slime_verlog import Field, Settings


class ShellSettings(Settings):
    """Settings that SWE and Harbor tasks share."""

    prompt_template: str | None = None
    """Jinja file that replaces the built-in system message."""
    max_steps: int = Field(default=30, ge=1)
    """Turns per episode."""
    max_calls: int = Field(default=4, ge=1)
    """Tool calls per turn; further ones are not run."""
    output_chars: int = Field(default=6000, ge=500)
    """Characters of one result; longer ones are cut."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of an invalid response."""
    submit_on_limit: bool = False
    """Judge the files when the turns are used up."""
    deterministic: bool = True
    """Set to false if commands print times or other things that change, as `cargo build` does. A
    lost episode is then given up instead of replayed."""


S = TypeVar("S", bound=ShellSettings)


@dataclass(frozen=True)
class Judgement:
    """The outcome of an episode: its reward and progression, the metrics, and a sentence for the
    agent."""

    reward: float = 0.0
    progression: float = 0.0
    sentence: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a check found about one task: what is wrong with it (empty if nothing is), and what is
    worth knowing."""

    task: str
    problem: str = ""
    note: str = ""


class ShellEnv(BaseInteractionEnv, Generic[S]):
    """One episode. Subclasses implement `open_files`, `judge_files` and `seconds_left`."""

    answer_format = "Think about what to do next, then call one or more tools."
    offered: ClassVar[Mapping[str, ShellTool]] = TOOLS
    template: ClassVar[Path]
    """The built-in system message."""
    limit_notes: ClassVar[tuple[str, str]]
    """What the prompt says about the last turn: without and with `submit_on_limit`."""

    def __init__(self, mission: str, settings: S) -> None:
        self.settings = settings
        self.deterministic = settings.deterministic
        self.mission = harmless(mission)
        self.max_steps = settings.max_steps
        self.steps = 0
        self.used_s = 0.0
        """Seconds that the agent's commands have taken."""
        self._bench: Workbench | None = None

    @abc.abstractmethod
    def open_files(self) -> tuple[Workbench, str]:
        """Make the episode's files: what tools act on, and the name of the folder that they start
        in."""

    @abc.abstractmethod
    def judge_files(self) -> Judgement:
        """Judge the files as they are now. No process of the agent is alive."""

    @abc.abstractmethod
    def seconds_left(self) -> float:
        """Seconds that the commands of the next turn may take together. At 0, the episode ends."""

    def prompt_variables(self) -> dict[str, Any]:
        """What a template may use besides the usual variables."""
        return {}

    def reset(self) -> Observation:
        self.close()
        self.steps = 0
        self.used_s = 0.0
        self._bench, folder = self.open_files()
        variables = {
            "mission": self.mission,
            "tools": [json.dumps(tool.schema) for tool in self.offered.values()],
            "max_steps": self.max_steps,
            "max_calls": self.settings.max_calls,
            "limit_note": self.limit_notes[self.settings.submit_on_limit],
            **self.prompt_variables(),
        }
        self.instruction_prompt = render_template(
            self.settings.prompt_template or self.template, variables
        )
        return make_observation(
            f"{folder} holds:\n{execute(self._bench, self._default_call()).text}", self._status()
        )

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if self._bench is None:
            raise EpisodeOverError(
                "step was called before reset or after the episode's end; call reset first"
            )
        self.steps += 1
        response = parse_response(
            response_text, self.settings.max_calls, self.offered, self.call_form
        )
        calls = response.calls if response.valid else (self._default_call(),)
        began = time.monotonic()
        text, failures, submitted = execute_all(
            replace(self._bench, deadline=began + self.seconds_left()), calls
        )
        self.used_s += time.monotonic() - began
        at_limit = not submitted and (self.steps >= self.max_steps or self.seconds_left() <= 0)
        judgement = Judgement()
        if submitted or (at_limit and self.settings.submit_on_limit):
            with timed("judge"):
                judgement = self.judge_files()
            text += f"\n\n{judgement.sentence}"
        if submitted or at_limit:
            self.close()
        info: StepInfo = {
            "reward": judgement.reward
            if response.valid
            else judgement.reward - self.settings.format_penalty,
            "terminated": submitted,
            "truncated": at_limit,
            "valid_action": response.valid,
            "executed_action": "\n".join(call.text() for call in calls)
            if response.valid
            else self.default_action,
            "progression": judgement.progression,
            "action": response_text[slice(*response.span)] if response.span else None,
            "action_span": response.span,
            "metrics": {
                "tool_calls": float(len(calls)),
                "tool_failures": float(failures),
                **judgement.metrics,
            },
        }
        if not response.valid:
            errors = harmless("; ".join(response.errors) or "no tool call was found")
            text = f"No tool of yours was run: {errors}. This was run instead.\n{text}"
        elif response.cut:
            text = f"Only the first calls of the response were run; there were too many.\n{text}"
        return make_observation(text, self._status()), submitted or at_limit, info

    def close(self) -> None:
        """Remove the episode's files."""
        if self._bench is not None:
            self._bench.workspace.close()
            self._bench = None

    def _default_call(self) -> Call:
        return parse_response(self.default_action, tools=self.offered).calls[0]

    def _status(self) -> str:
        return f"Turn {min(self.steps + 1, self.max_steps)} of {self.max_steps}."
