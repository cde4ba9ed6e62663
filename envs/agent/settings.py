"""The settings of an agent's environment."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.loading import split_command
from envs.swe.sandbox.supervise import Limits
from slime_verlog import Field, Settings

ADDRESS_MB = 65536
"""Address space of each process in the sandbox. Node.js, Go and Java reserve far more than they
use."""


class AgentSettings(Settings):
    """The YAML's `env:` mapping for agents. In the command and in the variables, `{prompt}`,
    `{task}`, `{seed}`, `{model}`, `{folder}` and `{base_url}` (of OpenAI's API) stand for the
    episode's values."""

    command: str | tuple[str, ...]
    """The agent's program with its arguments: a list, or one text that is split as in a shell. The
    program is looked up beside `python` first, then in PATH. It starts in a copy of `workdir`."""
    workdir: str | None = None
    """Folder with the agent's files and those of the task. Every episode gets its own copy; null
    for an empty one."""
    prompt: str = ""
    """The task in words, for `{prompt}` and the variable `AGENT_PROMPT`; `prepare` may write
    another one."""
    variables: Mapping[str, str] = {}
    """Environment variables of the program."""
    pass_env: tuple[str, ...] = ()
    """Variables of this process that the program gets as well. Without an entry here it gets PATH,
    HOME (an empty folder), TMPDIR (another one), LANG, the `AGENT_...` variables, and the model's
    address and key."""
    python: str | None = None
    """Interpreter of the agent, for example that of its virtual environment; null for the one that
    runs this."""
    prepare: str | None = None
    """Import path of a function that writes the task's files into an `AgentRun`'s `folder`; it may
    return a prompt."""
    grader: str | None = None
    """Import path of a function from an `AgentRun` to a score, 1 for solved; null: 1 for exit code
    0, else 0."""
    options: Mapping[str, Any] = {}
    """For `prepare` and `grader`, as `AgentRun.options`."""
    models: tuple[str, ...] = ("policy",)
    """Names under which the agent may ask for the model; the first one is `{model}`. `*` and `?`
    match as in file names. Requests for other models are refused."""
    actions: tuple[str, ...] = ()
    """Answers that the random player picks, also for imitation; by default it says arbitrary
    words."""
    request_mb: int = Field(default=4, ge=1)
    """MiB that the program's unanswered requests may have together; more is refused. Per MiB, a
    request may hold 2 million pixels and 32,768 JSON values. An episode's memory grows to about 15
    times this."""
    max_steps: int = Field(default=50, ge=1)
    """Requests that are answered per episode."""
    max_calls: int = Field(default=16, ge=1)
    """Tool calls per answer; an answer with more of them counts as one whose calls cannot be
    read."""
    time_limit_s: float = Field(default=40.0, gt=0)
    """Seconds that the program may work per episode; the time in which it waits for an answer does
    not count. `env_step_timeout_s` must be longer than this and `grade_timeout_s` together."""
    grade_at_limit: bool = False
    """Grade the work when a limit ends the episode; otherwise its reward is 0."""
    grade_timeout_s: float = Field(default=15.0, gt=0)
    """Seconds for `prepare` and `grader` each. `env_reset_timeout_s` must exceed the sum of this
    and `time_limit_s`."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of an answer with tool calls that cannot be read."""
    sandbox: bool = False
    """Run the program in a bubblewrap sandbox, whose only network is the model's address."""
    memory_mb: int = Field(default=4096, ge=1)
    """Memory that all processes in the sandbox may use together, in MB."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads that the program may run at once in the sandbox."""
    tree_mb: int = Field(default=1024, ge=1)
    """Size that the episode's folder may reach in the sandbox, in MB."""

    @model_validator(mode="after")
    def _can_start(self) -> Self:
        if not split_command(self.command, "env.command"):
            raise ConfigError("env.command is empty; name the agent's program")
        if not self.models:
            raise ConfigError("env.models is empty; the agent needs a name to ask for")
        for name in self.variables:
            if not name or set(name) & {"=", "\0"}:
                raise ConfigError(f"env.variables: {name!r} cannot be a variable's name; rename it")
        if self.python is not None and not self.interpreter.is_file():
            raise ConfigError(
                f"env.python: no file {self.python} (current directory: {Path.cwd()})"
            )
        for name in self.pass_env:
            if name not in os.environ:
                raise ConfigError(f"env.pass_env: the environment has no variable {name}")
        if self.workdir is not None and not Path(self.workdir).expanduser().is_dir():
            raise ConfigError(
                f"env.workdir: no folder {self.workdir} (current directory: {Path.cwd()})"
            )
        return self

    @property
    def interpreter(self) -> Path:
        """Return the agent's Python; links are kept, because a virtual environment is found through
        them."""
        return Path(self.python or sys.executable).expanduser().absolute()

    @property
    def limits(self) -> Limits:
        """Limits of the sandbox; its time is limited from outside."""
        return Limits(
            seconds=float("inf"),
            memory_mb=self.memory_mb,
            address_mb=max(ADDRESS_MB, self.memory_mb),
            processes=self.processes,
            tree_mb=self.tree_mb,
        )
