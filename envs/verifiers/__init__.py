"""Environments of the package `verifiers`, played by verifiers itself as an agent's program.

Every request that verifiers sends to its model is a turn, and the score of its rubric is the reward
of the last turn. verifiers runs in its own Python (`env.python`), so its dependencies never meet
ours.
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

PROGRAM = Path(__file__).with_name("verifiers_episode.py")


class VerifiersSettings(AgentSettings):
    """The YAML's `env:` mapping for environments of verifiers."""

    id: str
    """The environment: an installed package, a module in `workdir`, or a taskset that comes with
    verifiers."""
    args: Mapping[str, Any] = {}
    """Arguments of `load_environment`. For a taskset of verifiers 0.4: its environment config, such
    as `taskset` and the agents."""
    split: Literal["train", "eval"] = "train"
    """Data set to play; tasksets have only one."""
    examples: int | None = Field(default=None, ge=1)
    """How many examples are played, from the first one on; null: all. Required for endless
    tasksets."""
    command: str | tuple[str, ...] = f"python {PROGRAM.name}"
    prepare: str | None = "envs.verifiers:prepare"
    grader: str | None = "envs.verifiers:grade"


SETTINGS = VerifiersSettings


def prepare(run: AgentRun) -> None:
    """Write the program and what it plays into the episode's folder."""
    shutil.copy(PROGRAM, run.folder)
    (run.folder / "episode.json").write_text(json.dumps({**run.options, "seed": run.seed}))


def grade(run: AgentRun) -> float:
    """Return the rubric's score, 0 if a limit ended the episode; raises EnvironmentFault if
    verifiers failed."""
    if run.exit_code:
        last = (run.output.strip().splitlines() or ["nothing"])[-1]
        raise EnvironmentFault(
            f"verifiers ended with exit code {run.exit_code}; its last line: {last[:300]}"
        )
    return (
        0.0
        if run.exit_code is None
        else json.loads((run.folder / "result.json").read_text())["score"]
    )


def build_env(sample: Any, args: Any) -> AgentEnv:
    """Return the environment of one episode; its seed picks the example."""
    settings = read_env_settings(VerifiersSettings, args)
    played = settings.model_dump(include={"id", "args", "split", "examples"})
    return AgentEnv(*describe_task(sample), settings.model_copy(update={"options": played}))
