"""The settings of the tool environment, which geo3k and easy_vqa extend, and those of one MCP
server."""

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.loading import split_command
from envs.questions import QuestionSettings
from slime_verlog import Field, Settings


class ToolSettings(QuestionSettings):
    """The YAML's `env:` mapping."""

    tools: str | tuple[Any, ...] | Mapping[str, Any] = ()
    """Tools to offer: import paths, `.py` files, or mappings with `path`, `name`, `schema`,
    `config` and `timeout_s`, or with `mcp` (a server's tools) and `timeout_s`. Also a single one of
    these."""
    tools_in: Literal["template", "prompt"] = "template"
    """`template` passes tools and results through the chat template's tools section and tool role.
    `prompt` writes them into the system message and user messages, for chat templates without
    tools."""
    instruction: str | None = None
    """First sentence of the system message. A data set's own system message takes precedence."""
    prompt_template: str | None = None
    """Jinja file that replaces the built-in system message."""
    grader: str | None = None
    """How the final answer is scored: `exact`, `math`, or the import path of a function `(answer,
    question) -> score` or `(score, feedback)`. Without a grader, only tools give reward."""
    answer_retries: int = Field(default=0, ge=0)
    """How often a wrong final answer may be corrected. Needs a grader."""
    max_steps: int = Field(default=8, ge=1)
    """Turns per episode."""
    max_calls: int = Field(default=4, ge=1)
    """Calls per turn; an answer with more is invalid."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that one call may take, unless the tool sets its own limit."""
    turn_timeout_s: float = Field(default=45.0, gt=0)
    """Seconds that all calls of a turn may take together. Keep it below `env_step_timeout_s`."""
    output_chars: int = Field(default=8000, ge=200)
    """Characters of one result; the middle of a longer one is cut."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of an invalid answer."""
    deterministic: bool = True
    """Set to false if calls must not be repeated. A lost episode is then given up instead of
    replayed."""

    @model_validator(mode="after")
    def _retries_need_a_grader(self) -> Self:
        if self.answer_retries and self.grader is None:
            raise ConfigError(
                "env.answer_retries needs env.grader: without a grader, no answer is ever wrong"
            )
        return self


class McpSettings(Settings):
    """The `mcp:` mapping of an entry of `env.tools`."""

    command: str | tuple[str, ...] | None = None
    """Program that is the server, with its arguments: a list, or one text that is split as in a
    shell. It is looked up beside the running Python first, then in PATH."""
    url: str | None = None
    """Address of a running server that speaks streamable HTTP, such as
    `http://localhost:8000/mcp`."""
    include: tuple[str, ...] | None = None
    """The server's tools to offer; by default all of them."""
    prefix: str = ""
    """Put before every tool's name, for servers whose tools have the same names."""
    scope: Literal["worker", "episode"] = "worker"
    """`worker`: all episodes of a worker process share one connection; for servers that keep
    nothing between calls. `episode`: every episode starts the command, or opens a connection to the
    URL, for itself."""
    deterministic: bool = False
    """Whether the same calls always give the same results. If not, a lost episode is given up
    instead of replayed."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds in which the server must start and list its tools."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that the command gets. Without an entry here, it gets little more than
    HOME and PATH."""
    api_key_env: str | None = None
    """Environment variable with the key that is sent to the URL as a bearer token."""

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ConfigError("mcp needs either a command or a url")
        if not self.words and self.url is None:
            raise ConfigError("mcp.command is empty; name the server's program")
        for name in (*self.pass_env, *filter(None, [self.api_key_env])):
            if name not in os.environ:
                raise ConfigError(f"mcp: the environment has no variable {name}")
        return self

    @property
    def words(self) -> list[str]:
        """Return the command as a list; raises ConfigError if a quotation mark in the text is not
        closed."""
        return split_command(self.command or (), "mcp.command")

    @property
    def label(self) -> str:
        """Return the server in error messages."""
        return f"the MCP server {self.url or ' '.join(self.words)!r}"
