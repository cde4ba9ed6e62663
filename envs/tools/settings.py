"""The settings of the tool environment, which geo3k and easy_vqa extend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.questions import QuestionSettings
from slime_verlog import Field


class ToolSettings(QuestionSettings):
    """The YAML's `env:` mapping."""

    tools: str | tuple[Any, ...] | Mapping[str, Any] = ()
    """Tools to offer: import paths, `.py` files, or mappings with `path`, `name`, `schema`, `config` and `timeout_s`,
    or with `mcp` (a server's tools) and `timeout_s`. Also a single one of these, or a `.yaml` file with such a list
    under `tools:`."""
    tools_in: Literal["template", "prompt"] = "template"
    """`template` passes tools and results through the chat template's tools section and tool role. `prompt` writes
    them into the system message and user messages, for chat templates without tools."""
    instruction: str | None = None
    """First sentence of the system message. A data set's own system message takes precedence."""
    prompt_template: str | None = None
    """Jinja file that replaces the built-in system message."""
    grader: str | None = None
    """How the final answer is scored: `exact`, `math`, or the import path of a function `(answer, question) -> score`
    or `(score, feedback)`. Without a grader, only tools give reward."""
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
    max_images: int = Field(default=4, ge=1)
    """Pictures in one result."""
    max_tool_image_pixels: int = Field(default=2048 * 2048, ge=1)
    """Largest picture in a result, in pixels."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of an invalid answer."""
    tool_error_penalty: float = Field(default=0.0, ge=0)
    """Subtracted for every call that fails while it runs."""
    deterministic: bool = True
    """Set to false if calls must not be repeated. A lost episode is then given up instead of replayed."""

    @model_validator(mode="after")
    def _retries_need_a_grader(self) -> Self:
        if self.answer_retries and self.grader is None:
            raise ConfigError("env.answer_retries needs env.grader: without a grader, no answer is ever wrong")
        return self
