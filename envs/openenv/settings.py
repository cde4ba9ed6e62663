"""The settings of OpenEnv environments."""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.text_game import GameSettings
from slime_verlog import Field


class OpenEnvSettings(GameSettings):
    """Where the servers are, how answers become actions, and how observations become text."""

    url: str | tuple[str, ...]
    """Address of a server, such as `http://127.0.0.1:8000`, or a list of such, over which the
    episodes are spread."""
    reset: Mapping[str, Any] = {}
    """Arguments of every reset. The episode's seed is added as `seed`, unless it is set here."""
    action: str = "auto"
    """How an answer becomes an action. `auto` follows the server's schema: text for an action with
    one field, JSON for several, tools for an MCP environment. Or the name of the field that takes
    the answer, `tools`, or the import path of a function from the answer's text to a mapping (or to
    None if the answer is invalid)."""
    actions: Mapping[str, str] | tuple[str, ...] | None = None
    """All valid answers; a mapping adds descriptions. By default, any answer that the server
    accepts."""
    default_action: str | None = None
    """Sent in place of an invalid answer; null for the first of the listed actions, or, without a
    list, for nothing."""
    observation: str | None = None
    """How an observation becomes text: a Jinja template over its keys (it contains `{{` or `{%`),
    or the import path of a function from the observation to text or to BALROG's two text parts. By
    default one line `key: value` per key, without `metadata` and `state`."""
    picture: str | None = None
    """Key of the observation with an image, base64 or a data URI; shown if `vlm` is set."""
    done_is: Literal["terminated", "truncated"] = "terminated"
    """What the server's `done` means."""
    max_steps: int | None = Field(100, ge=1)
    """Steps after which an episode is truncated on our side; null for no limit."""
    instruction: str | None = None
    """Description of the task for the prompt. The protocol has none."""
    tools_in: Literal["template", "prompt"] = "template"
    """MCP environments: where the model sees the tools, as in `envs.tools`."""
    max_calls: int = Field(4, ge=1)
    """MCP environments: calls per turn; an answer with more is invalid."""
    deterministic: bool = False
    """Set to true if the server follows seeds exactly. A lost episode is then replayed instead of
    given up."""
    execution_error: Literal["fault", "invalid"] = "fault"
    """What an exception of the environment is: a fault, for which the episode is given up, or an
    invalid answer."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Seconds to connect to a server."""
    step_timeout_s: float = Field(45.0, gt=0)
    """Seconds that the reply to a reset or a step may take. Keep it below `env_step_timeout_s`; in
    MCP environments, `max_calls` times this number."""
    capacity_timeout_s: float = Field(60.0, ge=0)
    """Seconds that an episode waits to begin if all sessions are taken, or if servers that it knows
    are restarting. Meanwhile, the other episodes of its worker wait, too. Keep twice this number
    below `env_reset_timeout_s`."""
    api_key_env: str | None = None
    """Name of the environment variable with a key, sent as `Authorization: Bearer`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.urls:
            raise ConfigError("env.url: the list is empty; give at least one server's address")
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", url):
                raise ConfigError(
                    f"env.url: {url!r} is not the address of a server, such as "
                    "http://127.0.0.1:8000"
                )
        if self.vlm and self.picture is None:
            raise ConfigError("env.vlm needs env.picture, the observation's key with the picture")
        if self.actions is not None and self.default_action not in (None, *self.actions):
            raise ConfigError(
                f"env.default_action: {self.default_action!r} is not one of env.actions"
            )
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ConfigError(
                f"env.api_key_env: the environment variable {self.api_key_env} is not set"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of all servers, without a slash at the end."""
        urls = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(url.rstrip("/") for url in urls)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        return (
            {}
            if self.api_key_env is None
            else {"Authorization": f"Bearer {os.environ[self.api_key_env]}"}
        )
