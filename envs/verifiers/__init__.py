"""Environments of the package `verifiers`, played by verifiers itself as an agent's program.

Every request that verifiers sends to its model is a turn, and the score of its rubric is the reward of the last turn.
verifiers runs in its own Python (`env.python`), so its dependencies never meet ours.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from envs.agent import AgentEnv, AgentRun, AgentSettings
from envs.base import describe_task, read_env_settings
from envs.errors import EnvironmentFault
from slime_verlog import Field

EPISODE = "verifiers_episode.py"


class VerifiersSettings(AgentSettings):
    """The YAML's `env:` mapping for environments of verifiers: the keys below, and those of `envs.agent`."""

    id: str
    """Name of the environment: an installed package, a module in `workdir`, or a taskset that comes with verifiers."""
    args: Mapping[str, Any] = {}
    """Arguments of the environment's `load_environment`. Tasksets (verifiers from 0.4): verifiers' environment config,
    with `taskset` and a mapping per agent."""
    split: Literal["train", "eval"] = "train"
    """Data set of `load_environment`'s environments. Tasksets have no splits; choose their tasks in `args`."""
    examples: int | None = Field(default=None, ge=1)
    """The first so many examples are played, by seed; null: all. Required for tasksets without an end."""
    command: str | tuple[str, ...] = f"python {EPISODE}"
    prepare: str | None = "envs.verifiers:prepare"
    grader: str | None = "envs.verifiers:grade"


SETTINGS = VerifiersSettings


def prepare(run: AgentRun) -> None:
    """Write the program and what it plays into the episode's folder."""
    shutil.copy(Path(__file__).with_name("episode.py"), run.folder / EPISODE)
    (run.folder / "episode.json").write_text(json.dumps({**run.options, "seed": run.seed}))


def grade(run: AgentRun) -> float:
    """Return the score of the environment's rubric; raises EnvironmentFault if verifiers did not finish."""
    if run.exit_code is None:  # a limit of ours ended the episode
        return 0.0
    result = run.folder / "result.json"
    if run.exit_code or not result.is_file():
        last = (run.output.strip().splitlines() or ["nothing"])[-1]
        raise EnvironmentFault(f"verifiers ended with exit code {run.exit_code}; its last line: {last[:300]}")
    return float(json.loads(result.read_text())["score"])


def build_env(sample: Any, args: Any) -> AgentEnv:
    """Return the environment of one episode; the seed picks the example."""
    task, seed = describe_task(sample)
    settings = read_env_settings(VerifiersSettings, args)
    episode = settings.model_dump(include={"id", "args", "split", "examples"})
    return AgentEnv(task, seed, settings.model_copy(update={"options": episode}))
