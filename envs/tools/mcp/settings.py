"""The settings of one MCP server."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.loading import split_command
from slime_verlog import Field, Settings


class McpSettings(Settings):
    """The `mcp:` mapping of an entry of `env.tools`."""

    command: str | tuple[str, ...] | None = None
    """Program that is the server, with its arguments: a list, or one text that is split as in a shell. It is looked up
    beside the running Python first, then in PATH."""
    url: str | None = None
    """Address of a running server that speaks streamable HTTP, such as `http://localhost:8000/mcp`."""
    include: tuple[str, ...] | None = None
    """The server's tools to offer; by default all of them."""
    exclude: tuple[str, ...] = ()
    """The server's tools to leave out."""
    prefix: str = ""
    """Put before every tool's name, for servers whose tools have the same names."""
    scope: Literal["worker", "episode"] = "worker"
    """`worker`: all episodes of a worker process share one connection; for servers that keep nothing between calls.
    `episode`: every episode starts the command, or opens a connection to the URL, for itself."""
    deterministic: bool = False
    """Whether the same calls always give the same results. If not, a lost episode is given up instead of replayed."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds in which the server must start and list its tools."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that the command gets. Without an entry here, it gets little more than HOME and PATH."""
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
        """The command as a list.

        Raises:
            ConfigError: a quotation mark in the text is not closed.
        """
        return split_command(self.command or (), "mcp.command")

    @property
    def label(self) -> str:
        """The server in error messages."""
        return f"the MCP server {self.url or ' '.join(self.words)!r}"
