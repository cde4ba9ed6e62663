"""The whole error model: every error is named after the boundary that was crossed.

1. Vocabulary: the classes below; `name` is the key under which the metrics count them.
2. Classification: code at a boundary raises the boundary's error with `raise ... from`, nothing else does.
3. Surfacing: an error that stops a batch carries what reproduces it (environment, seed, actions).
4. A bad answer of the model is data, never an error.
"""

from __future__ import annotations

from envs.errors import (
    ConfigError,
    EnvironmentFault,
    EpisodeOverError,
    JudgeError,
    MissingDependencyError,
    SlimeVerlogError,
    ToolError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EncodingError",
    "EngineError",
    "EnvironmentFault",
    "EpisodeOverError",
    "FailureBudgetError",
    "JudgeError",
    "MissingDependencyError",
    "SlimeVerlogError",
    "ToolError",
]


class EngineError(SlimeVerlogError, RuntimeError):
    """The inference engine refused, vanished or answered nonsense; the turn may be issued again.

    `kind` is what the metrics count: `refused`, `connection_lost`, `timeout`, `http_<status>` or `bad_answer`.
    """

    def __init__(self, text: str, kind: str = "bad_answer") -> None:
        super().__init__(text)
        self.kind = kind


class EncodingError(SlimeVerlogError, ValueError):
    """A chat template or tokenizer cannot do what the chosen mode promises."""


class CheckpointError(SlimeVerlogError, RuntimeError):
    """A rollout checkpoint is damaged, foreign or of another version; nothing of it was loaded."""


class FailureBudgetError(SlimeVerlogError, RuntimeError):
    """More failed than the configured budget allows; the text holds what reproduces the last failure."""
