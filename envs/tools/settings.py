"""Every option of the tool environment, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envs.errors import ConfigError
from envs.questions import QuestionOptions
from envs.tools.results import ResultLimits


@dataclass(frozen=True, kw_only=True)
class ToolOptions(QuestionOptions):
    """The YAML's `env:` mapping; where the questions come from is in `QuestionOptions`."""

    tools: str | Mapping[str, Any] | tuple[Any, ...] = ()
    """Entries as `registry.load_tools` takes them."""
    tools_in: Literal["template", "prompt"] = "template"
    """Who shows tools and results: the chat template (its tools section, the role tool), or this project's prompt
    and user messages, for templates that know no tools."""
    instruction: str | None = None
    """What the system message says in place of the built-in sentence; a data set's own system message wins."""
    prompt_template: str | None = None
    grader: str | None = None
    """`exact`, `math` or an import path: what the final answer is worth; None: only tools pay."""
    answer_retries: int = 0
    """Times that a wrong final answer may be corrected."""
    max_steps: int = 8
    max_calls: int = 4
    """Calls taken per turn; an answer with more is invalid."""
    timeout_s: float = 20.0
    """Longest run of one call, unless the tool's entry says otherwise."""
    turn_timeout_s: float = 45.0
    """Longest run of all calls of a turn; keep it below env_step_timeout_s."""
    output_chars: int = 8000
    max_images: int = 4
    max_tool_image_pixels: int = 2048 * 2048
    format_penalty: float = 0.1
    tool_error_penalty: float = 0.0
    """Subtracted for every call that failed while it ran."""
    deterministic: bool = True
    """False where a call must not be repeated: a lost episode is then given up instead of replayed."""

    def __post_init__(self) -> None:
        for key in ("max_steps", "max_calls", "max_images", "max_tool_image_pixels", "max_image_pixels"):
            if getattr(self, key) < 1:
                raise ConfigError(f"env.{key} must be at least 1, got {getattr(self, key)}")
        for key in ("timeout_s", "turn_timeout_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"env.{key} must be above 0, got {getattr(self, key)}")
        for key in ("format_penalty", "tool_error_penalty", "answer_retries"):
            if getattr(self, key) < 0:
                raise ConfigError(f"env.{key} must not be negative, got {getattr(self, key)}")
        if self.output_chars < 200:
            raise ConfigError(f"env.output_chars must be at least 200, got {self.output_chars}")
        if self.answer_retries and self.grader is None:
            raise ConfigError("env.answer_retries needs env.grader: without it no answer is ever wrong")

    def limits(self) -> ResultLimits:
        """Size limits of one result."""
        return ResultLimits(self.output_chars, self.max_images, self.max_tool_image_pixels)
