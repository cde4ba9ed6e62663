"""The environment: a task's repository, tools to work on it, and a verdict at the end of the episode.

Invariants: any text is a legal answer. Nothing that the agent does reaches the machine outside its sandbox. The
reward comes from `evaluate` alone, once, at the end.
"""

from __future__ import annotations

import difflib
import functools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, describe_task, make_observation
from envs.errors import ConfigError, EpisodeOverError
from envs.swe.calls import Answer, Call, parse_answer, schemas
from envs.swe.instances import Instance, load_instances
from envs.swe.sandbox.sandbox import Sandbox, check_sandbox
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import Workspace
from envs.swe.small_tasks import small_instance
from envs.swe.tools import Workbench, execute, execute_all, harmless
from envs.swe.verdict.calibration import load_plan
from envs.swe.verdict.evaluate import Verdict, evaluate
from envs.swe.verdict.pristine import default_cache, pristine_tree
from envs.swe.verdict.runs import JudgeSettings, source_roots
from envs.text_game import render_template
from envs.timing import timed
from slime_verlog import Field, Settings, read_settings

_TEMPLATE = Path(__file__).with_name("prompt.j2")
_LIMIT_NOTES = {
    True: "When they are used up, the repository is judged as it is then.",
    False: "When they are used up without a submit, the task counts as not solved.",
}
ANSWER_FORMAT = "Think about what to do next, then call one or more tools."


class SWESettings(Settings):
    """The YAML's `env:` mapping for SWE tasks."""

    instances: str | None = None
    """File with tasks in SWE-Gym's format; without it, the task is one of `SMALL_TASKS`."""
    repos: Mapping[str, str] = {}
    """Folder of the local clone of each `repo` that the instances name."""
    python: str | None = None
    """Python interpreter with pytest and the repositories' dependencies; null for the one that runs the environment."""
    pythons: Mapping[str, str] = {}
    """Interpreters for particular repositories, keyed by `repo`; the others use `python`."""
    test_args: tuple[str, ...] = ()
    """Further pytest arguments. Plugins are off unless named here (`-p`, `pytest_asyncio`)."""
    cache_dir: str | None = None
    """Folder for pristine trees and fetched packages; `~/.cache/slime-verlog/swe` by default."""
    prompt_template: str | None = None
    """Jinja file that replaces the built-in system message."""
    max_steps: int = Field(default=30, ge=1)
    """Turns per episode."""
    max_calls: int = Field(default=4, ge=1)
    """Tool calls per turn; further ones are not run."""
    output_chars: int = Field(default=6000, ge=500)
    """Characters of one result; longer ones are cut."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of an invalid answer."""
    dense_reward: bool = False
    """Pay the share of tests that pass instead of 1 or 0."""
    submit_on_limit: bool = False
    """Judge the repository when the turns are used up."""
    command_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one command may take."""
    test_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one run of the tests may take. All commands of a turn together take at most the larger of this and
    `command_timeout_s`. Judging takes at most four times this, so `env_step_timeout_s` must exceed five times this."""
    memory_mb: int = Field(default=2048, ge=1)
    """Memory limit in MB, for each process and for all processes of a command together."""
    processes: int = Field(default=128, ge=1)
    """Processes and threads that a command may run at once."""
    file_mb: int = Field(default=64, ge=1)
    """Largest file that a command may write, in MB."""
    tree_mb: int = Field(default=512, ge=1)
    """Size that the repository's tree may reach, in MB."""
    writable_tests: bool = False
    """Let tests write into the tree in which they are judged, for repositories whose tests need it."""

    def cache(self) -> Path:
        """Folder for pristine trees and fetched packages."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else default_cache()

    def python_for(self, repo: str) -> Path:
        """Interpreter for a repository; its links are kept, as a virtual environment is found through them."""
        return Path(self.pythons.get(repo) or self.python or sys.executable).expanduser().absolute()

    def limits(self, seconds: float) -> Limits:
        """Limits of one command."""
        return Limits(
            seconds=seconds,
            memory_mb=self.memory_mb,
            processes=self.processes,
            file_mb=self.file_mb,
            tree_mb=self.tree_mb,
        )

    def judge(self, repo: str) -> JudgeSettings:
        """How tests of a repository are run."""
        limits = self.limits(self.test_timeout_s)
        return JudgeSettings(self.python_for(repo), limits, tuple(self.test_args), self.writable_tests)


SETTINGS = SWESettings


class SWEEnv(BaseInteractionEnv):
    """One task of mending a repository. `close` removes the agent's tree."""

    answer_format = ANSWER_FORMAT
    default_action = "view ."

    def __init__(self, instance: Instance, repository: Path, settings: SWESettings) -> None:
        self.instance, self.repository, self.settings = instance, repository, settings
        self.mission = harmless(instance.problem_statement)
        self.max_steps = settings.max_steps
        self.judge = settings.judge(instance.repo)
        self.verdict: Verdict | None = None
        """How the episode was judged; None until its end, or if it ended without being judged."""
        self._workspace: Workspace | None = None
        self._bench: Workbench | None = None
        self._steps = 0

    def reset(self) -> Observation:
        self.close()
        check_machine(self.judge.python)
        self._pristine = pristine_tree(self.repository, self.instance.base_commit, self.settings.cache())
        self._plan = load_plan(self.instance, self._pristine, self.settings.cache(), self.judge)
        self._workspace = Workspace(self._pristine)
        self._bench = self._make_bench(self._workspace)
        self._steps, self.verdict = 0, None
        self.instruction_prompt = self._render_prompt()
        listing = execute(self._bench, _DEFAULT_CALL).text
        return make_observation(f"The repository holds:\n{listing}", self._status())

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if self._bench is None or self._workspace is None:
            raise EpisodeOverError("step was called before reset or after the episode's end; call reset first")
        self._steps += 1
        answer = parse_answer(response_text, self.settings.max_calls)
        calls = answer.calls if answer.valid else (_DEFAULT_CALL,)
        text, failures, submitted = self._execute(self._bench, calls)
        at_limit = self._steps >= self.max_steps and not submitted
        if submitted or (at_limit and self.settings.submit_on_limit):
            self.verdict = self._evaluate(self._workspace)
            text += f"\n\n{_announce(self.verdict)}"
        done = submitted or at_limit
        if done:
            self.close()
        info = self._info(answer, calls, failures, terminated=submitted, truncated=at_limit)
        info["action"] = response_text[slice(*answer.span)] if answer.span else None
        return make_observation(explain(answer) + text, self._status()), done, info

    def close(self) -> None:
        self._bench = None
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _evaluate(self, workspace: Workspace) -> Verdict:
        with timed("judge"):
            return evaluate(self.instance, self._pristine, workspace.tree, self.judge, self._plan)

    def _execute(self, bench: Workbench, calls: tuple[Call, ...]) -> tuple[str, int, bool]:
        """What `execute_all` returns for the calls, which share one turn's time."""
        seconds = max(self.settings.command_timeout_s, self.settings.test_timeout_s)
        return execute_all(replace(bench, deadline=time.monotonic() + seconds), calls)

    def _info(
        self, answer: Answer, calls: tuple[Call, ...], failures: int, *, terminated: bool, truncated: bool
    ) -> StepInfo:
        verdict = self.verdict or Verdict(False)
        gain = verdict.progression if self.settings.dense_reward else float(verdict.solved)
        executed = "\n".join(call.text() for call in calls) if answer.valid else self.default_action
        metrics = {"tool_calls": float(len(calls)), "tool_failures": float(failures)}
        if self.verdict is not None:
            metrics |= {"fail_to_pass": verdict.fail_to_pass, "pass_to_pass": verdict.pass_to_pass}
        return {
            "reward": gain if answer.valid else gain - self.settings.format_penalty,
            "terminated": terminated,
            "truncated": truncated,
            "valid_action": answer.valid,
            "executed_action": executed,
            "progression": verdict.progression,
            "action_span": answer.span,
            "metrics": metrics,
        }

    def _make_bench(self, workspace: Workspace) -> Workbench:
        settings = self.settings
        sandbox = Sandbox(
            workspace.tree,
            self.judge.python,
            settings.limits(settings.command_timeout_s),
            variables=(("PYTHONPATH", ":".join(source_roots(workspace.tree))),),
            fixed_addresses=True,
        )
        return Workbench(workspace, sandbox, settings.output_chars, settings.test_timeout_s, self.judge.test_args)

    def _render_prompt(self) -> str:
        variables = {
            "mission": self.mission,
            "repo": self.instance.repo,
            "tools": [json.dumps(schema) for schema in schemas()],
            "max_steps": self.max_steps,
            "max_calls": self.settings.max_calls,
            "limit_note": _LIMIT_NOTES[self.settings.submit_on_limit],
        }
        return render_template(self.settings.prompt_template or _TEMPLATE, variables)

    def _status(self) -> str:
        return f"Turn {min(self._steps + 1, self.max_steps)} of {self.max_steps}."


_DEFAULT_CALL = parse_answer(SWEEnv.default_action).calls[0]


def explain(answer: Answer) -> str:
    """What was wrong with an answer, before the result of what was done instead."""
    if not answer.valid:
        errors = "; ".join(answer.errors) or "no tool call was found"
        return f"No tool of yours was run: {harmless(errors)}. This was run instead.\n"
    return "Only the first calls of the answer were run; there were too many.\n" if answer.cut else ""


def _announce(verdict: Verdict) -> str:
    return "Solved: all required tests pass." if verdict.solved else f"Not solved: {harmless(verdict.reason)}."


@functools.lru_cache(maxsize=32)
def check_machine(python: Path) -> None:
    """Make sure, once per interpreter, that the sandbox starts and that pytest can be imported in it.

    Raises:
        MissingDependencyError: no bubblewrap.
        EnvironmentFault: the machine does not let it work.
        ConfigError: the interpreter has no pytest.
    """
    sandbox = Sandbox(Path(__file__).parent, python, Limits(seconds=60), writable_tree=False)
    check_sandbox(sandbox)
    outcome = sandbox.run([str(python), "-s", "-B", "-c", "import pytest"])
    if outcome.returncode != 0:
        error = outcome.output.strip()[-300:] or outcome.stopped
        raise ConfigError(f"env.python: {python} cannot import pytest; install it there (pip install pytest): {error}")


def build_env(sample: Any, args: Any) -> SWEEnv:
    """Make the environment of one task; `task` is an `instance_id`. The seed changes nothing here.

    Raises:
        ConfigError: a bad option, an unknown task, or a repository that `env.repos` does not name.
        EnvironmentFault: a small task's release cannot be fetched.
        MissingDependencyError: bubblewrap, or pyarrow for a parquet file, is not installed.
    """
    task, _ = describe_task(sample)
    return make_env(task, read_settings(SWESettings, getattr(args, "env", None), "env."))


def make_env(task: str, settings: SWESettings) -> SWEEnv:
    """As `build_env`, from settings that are already read."""
    if settings.instances is None:
        python = settings.python_for("")
        check_machine(python)
        instance, repository = small_instance(task, settings.cache(), settings.judge(""))
        return SWEEnv(instance, repository, settings)
    instances = load_instances(settings.instances)
    if task not in instances:
        near = difflib.get_close_matches(task, instances, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{settings.instances} holds no instance {task!r}{hint}")
    instance = instances[task]
    if instance.repo not in settings.repos:
        raise ConfigError(
            f"env.repos does not say where {instance.repo} lies; clone it and add "
            f"`{instance.repo}: /path/to/clone` below env.repos"
        )
    return SWEEnv(instance, Path(settings.repos[instance.repo]).expanduser(), settings)
