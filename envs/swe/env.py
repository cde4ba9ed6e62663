"""The episode: a task's repository, the tools on it, and the verdict at its end.

Invariants: any text is a legal answer; nothing the agent does reaches the machine outside its sandbox; the reward
is paid by `evaluate` alone, once, at the end.
"""

from __future__ import annotations

import difflib
import functools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, describe_task, make_observation
from envs.errors import ConfigError, EpisodeOverError
from envs.options import read_options
from envs.swe.calibration import load_counter_tests
from envs.swe.calls import Answer, Call, parse_answer, schemas
from envs.swe.evaluate import Verdict, evaluate
from envs.swe.instances import Instance, load_instances
from envs.swe.pristine import default_cache, pristine_tree
from envs.swe.runs import JudgeSettings, source_roots
from envs.swe.sandbox import Sandbox, check_sandbox
from envs.swe.small_tasks import small_instance
from envs.swe.supervise import Limits
from envs.swe.tools import Workbench, describe, execute, harmless
from envs.swe.workspace import Workspace
from envs.text_game import render_template

_TEMPLATE = Path(__file__).with_name("prompt.j2")
_LIMIT_NOTES = {
    True: "When they are used up, the repository is judged as it is then.",
    False: "When they are used up without a submit, the task counts as not solved.",
}
ANSWER_FORMAT = "Think about what to do next, then call one or more tools."


@dataclass(frozen=True, kw_only=True)
class SWEOptions:
    """The YAML's `env:` mapping for SWE tasks."""

    instances: str | None = None
    """File with tasks in SWE-Gym's format; without it, the task is one of `SMALL_TASKS`."""
    repos: Mapping[str, str] = field(default_factory=dict)
    """Local clone of each `repo` that the instances name."""
    python: str | None = None
    """Interpreter that has pytest and what the repositories need; the running one by default."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of single repositories, by `repo`; `python` serves the others."""
    test_args: tuple[str, ...] = ()
    """Further pytest arguments; plugins are off unless named here (`-p`, `pytest_asyncio`)."""
    cache_dir: str | None = None
    prompt_template: str | None = None
    max_steps: int = 30
    max_calls: int = 4
    """Tool calls taken per turn."""
    output_chars: int = 6000
    """Longest result of one call."""
    format_penalty: float = 0.1
    dense_reward: bool = False
    """Pay the share of tests that pass instead of 1 or 0."""
    submit_on_limit: bool = False
    """Judge the repository when the turns are used up."""
    command_timeout_s: float = 30.0
    test_timeout_s: float = 120.0
    """Limit of one run of the tests. All commands of a turn together take no longer than the longer of the two, and
    judging takes at most four times this: `env_step_timeout_s` must exceed five times this."""
    memory_mb: int = 2048
    processes: int = 128
    file_mb: int = 64
    tree_mb: int = 512
    writable_tests: bool = False
    """Let tests write into the tree that they are judged in, for repositories whose tests need it."""

    def __post_init__(self) -> None:
        for key in ("max_steps", "max_calls", "memory_mb", "processes", "file_mb", "tree_mb"):
            if getattr(self, key) < 1:
                raise ConfigError(f"env.{key} must be at least 1, got {getattr(self, key)}")
        for key in ("command_timeout_s", "test_timeout_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"env.{key} must be above 0, got {getattr(self, key)}")
        if self.output_chars < 500:
            raise ConfigError(f"env.output_chars must be at least 500, got {self.output_chars}")
        if self.format_penalty < 0:
            raise ConfigError(f"env.format_penalty is subtracted, so it must be >= 0, got {self.format_penalty}")

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


class SWEEnv(BaseInteractionEnv):
    """One task of mending a repository. `close` removes the agent's tree."""

    answer_format = ANSWER_FORMAT
    default_action = "view ."

    def __init__(self, instance: Instance, repository: Path, options: SWEOptions) -> None:
        self.instance, self.repository, self.options = instance, repository, options
        self.mission = harmless(instance.problem_statement)
        self.max_steps = options.max_steps
        self.judge = options.judge(instance.repo)
        self.verdict: Verdict | None = None
        """How the episode was judged; None until its end, or if it ended without being judged."""
        self._workspace: Workspace | None = None
        self._bench: Workbench | None = None
        self._steps = 0

    def reset(self) -> Observation:
        self.close()
        check_machine(self.judge.python)
        self._pristine = pristine_tree(self.repository, self.instance.base_commit, self.options.cache())
        self._counter_tests = load_counter_tests(self.instance, self._pristine, self.options.cache(), self.judge)
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
        answer = parse_answer(response_text, self.options.max_calls)
        calls = answer.calls if answer.valid else (_DEFAULT_CALL,)
        text, failures, submitted = self._execute(self._bench, calls)
        at_limit = self._steps >= self.max_steps and not submitted
        if submitted or (at_limit and self.options.submit_on_limit):
            self.verdict = self._evaluate(self._workspace)
            text += f"\n\n{_announce(self.verdict)}"
        done = submitted or at_limit
        if done:
            self.close()
        info = self._info(answer, calls, failures, terminated=submitted, truncated=at_limit)
        info["action"] = response_text[slice(*answer.span)] if answer.span else None
        return make_observation(_explain(answer) + text, self._status()), done, info

    def close(self) -> None:
        self._bench = None
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _evaluate(self, workspace: Workspace) -> Verdict:
        shares = self.options.dense_reward
        return evaluate(self.instance, self._pristine, workspace.tree, self.judge, self._counter_tests, shares)

    def _execute(self, bench: Workbench, calls: tuple[Call, ...]) -> tuple[str, int, bool]:
        """Run the calls in order up to a submit: (what to show, how many failed, whether submitted)."""
        shown, failures = [], 0
        seconds = max(self.options.command_timeout_s, self.options.test_timeout_s)
        bench = replace(bench, deadline=time.monotonic() + seconds)
        for number, call in enumerate(calls, 1):
            if call.name == "submit":
                return "\n\n".join([*shown, f"[{number}] submit"]), failures, True
            result = execute(bench, call)
            failures += not result.ok
            shown.append(f"[{number}] {describe(call)}\n{result.text}")
        return "\n\n".join(shown), failures, False

    def _info(
        self, answer: Answer, calls: tuple[Call, ...], failures: int, *, terminated: bool, truncated: bool
    ) -> StepInfo:
        verdict = self.verdict or Verdict(False)
        gain = verdict.progression if self.options.dense_reward else float(verdict.solved)
        executed = "\n".join(call.text() for call in calls) if answer.valid else self.default_action
        metrics = {"tool_calls": float(len(calls)), "tool_failures": float(failures)}
        if self.verdict is not None:
            metrics |= {"fail_to_pass": verdict.fail_to_pass, "pass_to_pass": verdict.pass_to_pass}
        return {
            "reward": gain if answer.valid else gain - self.options.format_penalty,
            "terminated": terminated,
            "truncated": truncated,
            "valid_action": answer.valid,
            "executed_action": executed,
            "progression": verdict.progression,
            "action_span": answer.span,
            "metrics": metrics,
        }

    def _make_bench(self, workspace: Workspace) -> Workbench:
        options = self.options
        sandbox = Sandbox(
            workspace.tree,
            self.judge.python,
            options.limits(options.command_timeout_s),
            variables=(("PYTHONPATH", ":".join(source_roots(workspace.tree))),),
            fixed_addresses=True,
        )
        return Workbench(workspace, sandbox, options.output_chars, options.test_timeout_s, self.judge.test_args)

    def _render_prompt(self) -> str:
        variables = {
            "mission": self.mission,
            "repo": self.instance.repo,
            "tools": [json.dumps(schema) for schema in schemas()],
            "max_steps": self.max_steps,
            "max_calls": self.options.max_calls,
            "limit_note": _LIMIT_NOTES[self.options.submit_on_limit],
        }
        return render_template(self.options.prompt_template or _TEMPLATE, variables)

    def _status(self) -> str:
        return f"Turn {min(self._steps + 1, self.max_steps)} of {self.max_steps}."


_DEFAULT_CALL = parse_answer(SWEEnv.default_action).calls[0]


def _explain(answer: Answer) -> str:
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
    return make_env(task, read_options(SWEOptions, dict(getattr(args, "env", None) or {}), "env."))


def make_env(task: str, options: SWEOptions) -> SWEEnv:
    """As `build_env`, from options that were read already."""
    if options.instances is None:
        python = options.python_for("")
        check_machine(python)
        instance, repository = small_instance(task, options.cache(), options.judge(""))
        return SWEEnv(instance, repository, options)
    instances = load_instances(options.instances)
    if task not in instances:
        near = difflib.get_close_matches(task, instances, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{options.instances} holds no instance {task!r}{hint}")
    instance = instances[task]
    if instance.repo not in options.repos:
        raise ConfigError(
            f"env.repos does not say where {instance.repo} lies; clone it and add "
            f"`{instance.repo}: /path/to/clone` below env.repos"
        )
    return SWEEnv(instance, Path(options.repos[instance.repo]).expanduser(), options)
