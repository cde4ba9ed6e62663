"""Tasks in Harbor's format (Terminal-Bench 2 and others): work in a shell, rewarded by the tests of
the task.

The environment is a task's files, a shell to work on them, and the task's own tests at the end. A
task's reference solution checks the task.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.base import describe_task, read_env_settings
from envs.errors import ConfigError, SlimeVerlogError, did_you_mean
from envs.harbor.machine import start
from envs.harbor.places import SOLUTION, part_of
from envs.harbor.settings import HarborSettings
from envs.harbor.task import HarborTask, find_tasks, read_task, why_forgeable
from envs.harbor.verifier import NO_REWARD, Verdict, verify
from envs.swe.sandbox.sandbox import check_sandbox, find_bwrap
from envs.swe.sandbox.workspace import copy_tree, remove_tree
from envs.swe.shell import Finding, Judgement, ShellEnv
from envs.swe.tools import TOOLS, Workbench, harmless
from envs.tools.results import clip

ANY = "*"
"""Task that draws one of those that `include` and `exclude` select."""
_DESCRIPTIONS = {
    "run": "Run a shell command.",
    "submit": "End the task. The files are checked as they are now.",
}


class HarborEnv(ShellEnv[HarborSettings]):
    """One task in Harbor's format. `close` removes the episode's files."""

    default_action = "run ls"
    offered = {name: replace(TOOLS[name], description=text) for name, text in _DESCRIPTIONS.items()}
    template = Path(__file__).with_name("prompt.j2")
    limit_notes = (
        "When they are used up without a submit, the task counts as not done.",
        "When they are used up, the files are checked as they are then.",
    )

    def __init__(self, task: HarborTask, settings: HarborSettings) -> None:
        super().__init__(task.instruction, settings)
        self.task, self.mission = task, self.mission.strip()
        self.verdict: Verdict | None = None
        """How the episode was judged; None until its end, or if it ended without being judged."""

    def open_files(self) -> tuple[Workbench, str]:
        self._machine = start(self.task, self.settings)
        self.verdict = None
        sandbox = self._machine.for_agent()
        check_sandbox(sandbox)
        return Workbench(
            self._machine.workspace, sandbox, self.settings.output_chars
        ), self.task.image.folder

    def seconds_left(self) -> float:
        left = float("inf") if self.task.agent_s is None else self.task.agent_s - self.used_s
        return min(self.settings.command_timeout_s, left)

    def judge_files(self) -> Judgement:
        verdict = self.verdict = verify(self._machine)
        why = clip(harmless(verdict.reason), 500)
        sentence = f"No reward: {why}." if why else f"Reward: {verdict.reward:g}."
        return Judgement(
            verdict.reward,
            verdict.progression,
            sentence,
            {"without_reward": float(bool(verdict.reason))},
        )

    def prompt_variables(self) -> dict[str, Any]:
        return {
            "folder": self.task.image.folder,
            "places": ", ".join(self.task.places),
            "seconds": f"{self.settings.command_timeout_s:g}",
        }


SETTINGS = HarborSettings
DEFAULT_TASK = "count-errors"


def build_env(sample: Any, args: Any) -> HarborEnv:
    """Make the environment of one task; the seed only draws among the tasks of `*`."""
    task, seed = describe_task(sample)
    settings = read_env_settings(HarborSettings, args)
    find_bwrap()
    tasks = select_tasks(task, settings)
    return HarborEnv(tasks[seed % len(tasks)], settings)


def select_tasks(name: str, settings: HarborSettings) -> list[HarborTask]:
    """Read the tasks of `select_folders`; raises ConfigError also for one that cannot be played
    here."""
    return [read_task(folder, settings) for folder in select_folders(name, settings)]


def select_folders(name: str, settings: HarborSettings) -> list[Path]:
    """Find the task `name`, or for `*` all that `include` and `exclude` select; raises ConfigError
    if it is unknown."""
    folders = find_tasks(settings)
    if name != ANY:
        if name not in folders:
            hint = did_you_mean(name, folders, f"there are {', '.join([*folders][:8])}", n=1)
            searched = ", ".join(map(str, settings.task_folders()))
            raise ConfigError(f"the folders {searched} hold no task {name!r}; {hint}")
        return [folders[name]]
    chosen = [
        folder
        for task, folder in folders.items()
        if any(fnmatch.fnmatchcase(task, pattern) for pattern in settings.include)
        and not any(fnmatch.fnmatchcase(task, pattern) for pattern in settings.exclude)
    ]
    if not chosen:
        raise ConfigError(f"env.include and env.exclude leave none of the {len(folders)} tasks")
    return chosen


def check_references(name: str, settings: HarborSettings) -> Iterator[Finding]:
    """Run the reference solution of a task, or of all tasks of `*`, and judge it and the untouched
    files."""
    for task in select_tasks(name, settings):
        try:
            yield _check(task, settings)
        except SlimeVerlogError as error:
            yield Finding(task.name, str(error).removeprefix(f"{task.name}: "))


def _check(task: HarborTask, settings: HarborSettings) -> Finding:
    untouched = _judge(task, settings, solved=False)
    if untouched.reward > 0:
        return Finding(task.name, f"the untouched files are paid {untouched.reward:g}")
    notes = list(filter(None, [why_forgeable(task, settings)]))
    if untouched.reason.startswith(NO_REWARD):
        notes.append(
            "its tests write no reward when they fail, so a program that they run could write one"
        )
    if not task.has_solution:
        notes.append("there is no solution/solve.sh, so it is not known whether it can be solved")
        return Finding(task.name, note="; ".join(notes))
    solved = _judge(task, settings, solved=True)
    if solved.reward <= 0:
        why = solved.reason or "the tests pay 0"
        printed = " ".join(solved.output.split())[-300:] or "nothing"
        return Finding(
            task.name, f"the reference solution is not paid: {why}; it printed: {printed}"
        )
    if solved.reward != 1:
        notes.append(f"the reference solution is paid {solved.reward:g}")
    return Finding(task.name, note="; ".join(notes))


def _judge(task: HarborTask, settings: HarborSettings, *, solved: bool) -> Verdict:
    machine = start(task, settings)
    try:
        if not solved:
            return verify(machine)
        part = machine.tree / part_of(SOLUTION)
        remove_tree(part)
        copy_tree((task.folder / "solution").resolve(), part)
        done = machine.for_solution().run(["bash", f"{SOLUTION}/solve.sh"])
        if done.stopped:
            return Verdict(
                reason=f"solve.sh was stopped by its {done.stopped} limit", output=done.output
            )
        verdict = verify(machine)
        return replace(verdict, output=f"{done.output}\n{verdict.output}")
    finally:
        machine.close()
