"""The whole error model: every error is named after the boundary that was crossed.

1. Vocabulary: the classes below.
2. Classification: only code at a boundary raises the boundary's error, with `raise ... from`.
3. Surfacing: an error that stops a batch names what reproduces it (environment, seed, actions).
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
    """The inference engine refused, disappeared or sent a malformed answer; the turn may be sent again.

    `kind` is the name in the metrics: `refused`, `connection_lost`, `timeout`, `http_<status>` or `bad_answer`.
    """

    def __init__(self, text: str, kind: str = "bad_answer") -> None:
        super().__init__(text)
        self.kind = kind


class EncodingError(SlimeVerlogError, ValueError):
    """A chat template or tokenizer does not support the chosen mode."""


class CheckpointError(SlimeVerlogError, RuntimeError):
    """A rollout checkpoint is damaged, of another version, or something else; nothing was loaded."""


class FailureBudgetError(SlimeVerlogError, RuntimeError):
    """More episodes failed than the configured budget allows; the text says how to reproduce the last failure."""
