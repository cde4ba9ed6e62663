"""Fixing bugs in a repository: the agent reads, edits and runs code with tools, and tests decide
about the reward.

The environment is a task's repository, tools to work on it, and a verdict at the end of the
episode.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.base import describe_task, read_env_settings
from envs.errors import ConfigError, did_you_mean
from envs.swe.sandbox.sandbox import Sandbox, check_sandbox
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import Workspace
from envs.swe.shell import Judgement, ShellEnv, ShellSettings
from envs.swe.small_tasks import small_instance
from envs.swe.tools import Workbench, harmless
from envs.swe.verdict.calibration import load_plan
from envs.swe.verdict.evaluate import Plan, TestSettings, Verdict, evaluate, source_roots
from envs.swe.verdict.instances import Instance, load_instances
from envs.swe.verdict.trees import default_cache, pristine_tree
from slime_verlog import Field


class SWESettings(ShellSettings):
    """The YAML's `env:` mapping for SWE tasks."""

    instances: str | None = None
    """File with tasks in SWE-Gym's format; without it, the task is one of `SMALL_TASKS`."""
    repos: Mapping[str, str] = {}
    """Folder of the local clone of each `repo` that the instances name."""
    python: str | None = None
    """Python interpreter with pytest and the repositories' dependencies; null for the one that runs
    the environment."""
    pythons: Mapping[str, str] = {}
    """Interpreters for particular repositories, keyed by `repo`; the others use `python`."""
    test_args: tuple[str, ...] = ()
    """Further pytest arguments. Plugins are off unless named here (`-p`, `pytest_asyncio`)."""
    cache_dir: str | None = None
    """Folder for pristine trees and fetched packages; `~/.cache/slime-verlog/swe` by default."""
    dense_reward: bool = False
    """Pay the share of tests that pass instead of 1 or 0."""
    command_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one command may take."""
    test_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one run of the tests may take. All commands of a turn together take at most the
    larger of this and `command_timeout_s`. Judging takes at most four times this, so
    `env_step_timeout_s` must exceed five times this."""
    memory_mb: int = Field(default=2048, ge=1)
    """Memory limit in MB, for each process and for all processes of a command together."""
    processes: int = Field(default=128, ge=1)
    """Processes and threads that a command may run at once."""
    file_mb: int = Field(default=64, ge=1)
    """Largest file that a command may write, in MB."""
    tree_mb: int = Field(default=512, ge=1)
    """Size that the repository's tree may reach, in MB."""
    writable_tests: bool = False
    """Let tests write into the tree in which they are judged, for repositories whose tests need
    it."""

    def cache(self) -> Path:
        """Folder for pristine trees and fetched packages."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else default_cache()

    def python_for(self, repo: str) -> Path:
        """Interpreter for a repository; its links are kept, as a virtual environment is found
        through them."""
        return Path(self.pythons.get(repo) or self.python or sys.executable).expanduser().absolute()

    def limits(self, seconds: float) -> Limits:
        """Limits of one command."""
        return Limits(seconds, self.memory_mb, None, self.processes, self.file_mb, self.tree_mb)

    def judge(self, repo: str) -> TestSettings:
        """How tests of a repository are run."""
        limits = self.limits(self.test_timeout_s)
        return TestSettings(
            self.python_for(repo), limits, tuple(self.test_args), self.writable_tests
        )


SETTINGS = SWESettings
DEFAULT_TASK = "toolz_interleave"


class SWEEnv(ShellEnv[SWESettings]):
    """One task of mending a repository. `close` removes the agent's tree."""

    default_action = "view ."
    template = Path(__file__).with_name("prompt.j2")
    limit_notes = (
        "When they are used up without a submit, the task counts as not solved.",
        "When they are used up, the repository is judged as it is then.",
    )

    def __init__(self, instance: Instance, repository: Path, settings: SWESettings) -> None:
        super().__init__(instance.problem_statement, settings)
        self.instance = instance
        self.repository = repository
        self.judge = settings.judge(instance.repo)
        self.verdict: Verdict | None = None
        """How the episode was judged; None until its end, or if it ended without being judged."""

    def prepare(self) -> tuple[Path, Plan]:
        """Return the pristine tree and the verdict's plan, both cached; raises as `pristine_tree`
        and `load_plan`."""
        cache = self.settings.cache()
        pristine = pristine_tree(self.repository, self.instance.base_commit, cache)
        return pristine, load_plan(self.instance, pristine, cache, self.judge)

    def reward(self, verdict: Verdict) -> float:
        """Return what a verdict pays."""
        return verdict.progression if self.settings.dense_reward else float(verdict.solved)

    def open_files(self) -> tuple[Workbench, str]:
        settings = self.settings
        self.verdict = None
        check_machine(self.judge.python)
        self._pristine, self._plan = self.prepare()
        self._workspace = Workspace(self._pristine)
        sandbox = Sandbox(
            self._workspace.tree,
            self.judge.python,
            settings.limits(settings.command_timeout_s),
            variables=(("PYTHONPATH", ":".join(source_roots(self._workspace.tree))),),
            fixed_addresses=True,
        )
        limits = settings.output_chars, settings.test_timeout_s
        return Workbench(self._workspace, sandbox, *limits, self.judge.test_args), "The repository"

    def seconds_left(self) -> float:
        return max(self.settings.command_timeout_s, self.settings.test_timeout_s)

    def judge_files(self) -> Judgement:
        verdict = self.verdict = evaluate(
            self.instance, self._pristine, self._workspace.tree, self.judge, self._plan
        )
        sentence = (
            "Solved: all required tests pass."
            if verdict.solved
            else f"Not solved: {harmless(verdict.reason)}."
        )
        metrics = {"fail_to_pass": verdict.fail_to_pass, "pass_to_pass": verdict.pass_to_pass}
        return Judgement(self.reward(verdict), verdict.progression, sentence, metrics)

    def prompt_variables(self) -> dict[str, Any]:
        return {"repo": self.instance.repo}


@functools.lru_cache(maxsize=32)
def check_machine(python: Path) -> None:
    """Make sure, once per interpreter, that the sandbox starts and that pytest can be imported in
    it.

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
        raise ConfigError(
            f"env.python: {python} cannot import pytest; install it there (pip install pytest): "
            f"{error}"
        )


def build_env(sample: Any, args: Any) -> SWEEnv:
    """Make the environment of one task; `task` is an `instance_id`. The seed changes nothing
    here."""
    task, _ = describe_task(sample)
    return make_env(task, read_env_settings(SWESettings, args))


def make_env(task: str, settings: SWESettings) -> SWEEnv:
    """As `build_env`, from settings that are already read."""
    if settings.instances is None:
        check_machine(settings.python_for(""))
        instance, repository = small_instance(task, settings.cache(), settings.judge(""))
        return SWEEnv(instance, repository, settings)
    instances = load_instances(settings.instances)
    if task not in instances:
        hint = did_you_mean(task, instances, f"there are {len(instances)}", n=1)
        raise ConfigError(f"{settings.instances} holds no instance {task!r}; {hint}")
    instance = instances[task]
    if instance.repo not in settings.repos:
        raise ConfigError(
            f"env.repos does not say where {instance.repo} lies; clone it and add "
            f"`{instance.repo}: /path/to/clone` below env.repos"
        )
    return SWEEnv(instance, Path(settings.repos[instance.repo]).expanduser(), settings)
