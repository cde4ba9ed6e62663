"""The environment: a task's files, a shell to work on them, and the task's own tests at the end."""

import fnmatch
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.base import describe_task, read_env_settings
from envs.errors import ConfigError, did_you_mean
from envs.harbor.machine import start
from envs.harbor.settings import HarborSettings
from envs.harbor.task import HarborTask, find_tasks, read_task
from envs.harbor.verifier import Verdict, verify
from envs.swe.calls import TOOLS
from envs.swe.sandbox.sandbox import check_sandbox, find_bwrap
from envs.swe.shell import Judgement, ShellEnv
from envs.swe.tools import Workbench, harmless
from envs.tools.results import clip

ANY = "*"
"""Task that draws one of those that `include` and `exclude` select."""
_DESCRIPTIONS = {"run": "Run a shell command.", "submit": "End the task. The files are checked as they are now."}


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
        self._machine, self.verdict = start(self.task, self.settings), None
        sandbox = self._machine.for_agent()
        check_sandbox(sandbox)
        return Workbench(self._machine.workspace, sandbox, self.settings.output_chars), self.task.image.folder

    def seconds_left(self) -> float:
        left = float("inf") if self.task.agent_s is None else self.task.agent_s - self.used_s
        return min(self.settings.command_timeout_s, left)

    def judge_files(self) -> Judgement:
        verdict = self.verdict = verify(self._machine)
        why = clip(harmless(verdict.reason), 500)
        sentence = f"No reward: {why}." if why else f"Reward: {verdict.reward:g}."
        metrics = {"without_reward": float(bool(verdict.reason))}
        return Judgement(verdict.reward, verdict.progression, sentence, metrics)

    def prompt_variables(self) -> dict[str, Any]:
        return {
            "folder": self.task.image.folder,
            "places": ", ".join(self.task.places),
            "seconds": f"{self.settings.command_timeout_s:g}",
        }


def build_env(sample: Any, args: Any) -> HarborEnv:
    """Make the environment of one task; the seed only draws among the tasks of `*`."""
    task, seed = describe_task(sample)
    settings = read_env_settings(HarborSettings, args)
    find_bwrap()
    tasks = select_tasks(task, settings)
    return HarborEnv(tasks[seed % len(tasks)], settings)


def select_tasks(name: str, settings: HarborSettings) -> list[HarborTask]:
    """Read the tasks of `select_folders`; raises ConfigError also for one that cannot be played here."""
    return [read_task(folder, settings) for folder in select_folders(name, settings)]


def select_folders(name: str, settings: HarborSettings) -> list[Path]:
    """Find the task `name`, or for `*` all that `include` and `exclude` select; raises ConfigError if it is unknown."""
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
