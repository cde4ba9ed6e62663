"""The environment: a task's files, a shell to work on them, and the task's own tests at the end.

Invariants: any text is a legal answer. Nothing that the agent does reaches the machine outside its sandbox. The
reward comes from `verify` alone, once, after the agent's last command.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, describe_task, make_observation, read_env_settings
from envs.errors import ConfigError, EpisodeOverError
from envs.harbor.machine import Machine, start
from envs.harbor.settings import HarborSettings
from envs.harbor.task import HarborTask, find_tasks, read_task
from envs.harbor.verifier import Verdict, verify
from envs.swe.calls import Answer, Call, parse_answer, schemas, with_descriptions
from envs.swe.env import explain
from envs.swe.sandbox.sandbox import check_sandbox, find_bwrap
from envs.swe.tools import Workbench, clip, execute, execute_all, harmless
from envs.text_game import render_template
from envs.timing import timed

ANY = "*"
"""Task that draws one of those that `include` and `exclude` select."""
_TEMPLATE = Path(__file__).with_name("prompt.j2")
_LIMIT_NOTES = {
    True: "When they are used up, the files are checked as they are then.",
    False: "When they are used up without a submit, the task counts as not done.",
}
_TOOLS = with_descriptions(
    {
        "run": "Run a shell command.",
        "submit": "End the task. The files are checked as they are now.",
    }
)


class HarborEnv(BaseInteractionEnv):
    """One task in Harbor's format. `close` removes the episode's files."""

    answer_format = "Think about what to do next, then call one or more tools."
    default_action = "run ls"

    def __init__(self, task: HarborTask, settings: HarborSettings) -> None:
        self.task, self.settings = task, settings
        self.mission = harmless(task.instruction).strip()
        self.max_steps = settings.max_steps
        self.verdict: Verdict | None = None
        """How the episode was judged; None until its end, or if it ended without being judged."""
        self.steps = 0
        self._machine: Machine | None = None
        self._used_s = 0.0

    def reset(self) -> Observation:
        self.close()
        self._machine = start(self.task, self.settings)
        check_sandbox(self._machine.for_agent())
        self.steps, self.verdict, self._used_s = 0, None, 0.0
        self.instruction_prompt = self._render_prompt()
        listing = execute(self._bench(self._machine), _DEFAULT_CALL).text
        return make_observation(f"{self.task.image.folder} holds:\n{listing}", self._status())

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if self._machine is None:
            raise EpisodeOverError("step was called before reset or after the episode's end; call reset first")
        self.steps += 1
        answer = parse_answer(response_text, self.settings.max_calls, _TOOLS)
        calls = answer.calls if answer.valid else (_DEFAULT_CALL,)
        text, failures, submitted = self._execute(self._machine, calls)
        at_limit = not submitted and (self.steps >= self.max_steps or self._left() <= 0)
        if submitted or (at_limit and self.settings.submit_on_limit):
            with timed("judge"):
                self.verdict = verify(self._machine)
            text += f"\n\n{_announce(self.verdict)}"
        done = submitted or at_limit
        if done:
            self.close()
        info = self._info(answer, calls, failures, terminated=submitted, truncated=at_limit)
        info["action"] = response_text[slice(*answer.span)] if answer.span else None
        return make_observation(explain(answer) + text, self._status()), done, info

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None

    def _execute(self, machine: Machine, calls: tuple[Call, ...]) -> tuple[str, int, bool]:
        """What `execute_all` returns for the calls, whose time counts towards the task's limit."""
        began = time.monotonic()
        bench = replace(self._bench(machine), deadline=began + min(self.settings.command_timeout_s, self._left()))
        found = execute_all(bench, calls)
        self._used_s += time.monotonic() - began
        return found

    def _left(self) -> float:
        """Seconds that the task's time limit leaves for the agent's commands."""
        return float("inf") if self.task.agent_s is None else self.task.agent_s - self._used_s

    def _bench(self, machine: Machine) -> Workbench:
        return Workbench(machine.workspace, machine.for_agent(), self.settings.output_chars)

    def _info(
        self, answer: Answer, calls: tuple[Call, ...], failures: int, *, terminated: bool, truncated: bool
    ) -> StepInfo:
        verdict = self.verdict or Verdict()
        metrics = {"tool_calls": float(len(calls)), "tool_failures": float(failures)}
        if self.verdict is not None:
            metrics["without_reward"] = float(bool(verdict.reason))
        return {
            "reward": verdict.reward if answer.valid else verdict.reward - self.settings.format_penalty,
            "terminated": terminated,
            "truncated": truncated,
            "valid_action": answer.valid,
            "executed_action": "\n".join(c.text() for c in calls) if answer.valid else self.default_action,
            "progression": verdict.progression,
            "action_span": answer.span,
            "metrics": metrics,
        }

    def _render_prompt(self) -> str:
        variables = {
            "mission": self.mission,
            "tools": [json.dumps(schema) for schema in schemas(_TOOLS)],
            "folder": self.task.image.folder,
            "places": ", ".join(place.path for place in self.task.places),
            "seconds": f"{self.settings.command_timeout_s:g}",
            "max_steps": self.max_steps,
            "max_calls": self.settings.max_calls,
            "limit_note": _LIMIT_NOTES[self.settings.submit_on_limit],
        }
        return render_template(self.settings.prompt_template or _TEMPLATE, variables)

    def _status(self) -> str:
        return f"Turn {min(self.steps + 1, self.max_steps)} of {self.max_steps}."


_DEFAULT_CALL = parse_answer(HarborEnv.default_action, tools=_TOOLS).calls[0]


def _announce(verdict: Verdict) -> str:
    return f"No reward: {clip(harmless(verdict.reason), 500)}." if verdict.reason else f"Reward: {verdict.reward:g}."


def build_env(sample: Any, args: Any) -> HarborEnv:
    """Make the environment of one task; the seed only draws among the tasks of `*`.

    Raises:
        ConfigError: a bad option, an unknown task, or a task that cannot be played here; the text names the reason.
        MissingDependencyError: bubblewrap is not installed.
    """
    task, seed = describe_task(sample)
    settings = read_env_settings(HarborSettings, args)
    find_bwrap()
    tasks = select_tasks(task, settings)
    return HarborEnv(tasks[seed % len(tasks)], settings)


def select_tasks(name: str, settings: HarborSettings) -> list[HarborTask]:
    """The task of this name; for `*`, all that `include` and `exclude` select.

    Raises:
        ConfigError: there is none, or one of them cannot be played here.
    """
    folders = find_tasks(settings)
    if name != ANY:
        if name not in folders:
            near = difflib.get_close_matches(name, folders, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*folders][:8])}"
            raise ConfigError(f"{_described(settings)} hold no task {name!r}; {hint}")
        return [read_task(folders[name], settings)]
    chosen = [
        folder
        for task, folder in folders.items()
        if any(fnmatch.fnmatchcase(task, pattern) for pattern in settings.include)
        and not any(fnmatch.fnmatchcase(task, pattern) for pattern in settings.exclude)
    ]
    if not chosen:
        raise ConfigError(f"env.include and env.exclude leave none of the {len(folders)} tasks")
    return [read_task(folder, settings) for folder in chosen]


def _described(settings: HarborSettings) -> str:
    return "the folders " + ", ".join(map(str, settings.task_folders()))
