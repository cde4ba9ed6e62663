"""Errors that an environment raises, named by what went wrong; `rollout.errors` holds the whole model."""

from __future__ import annotations

from slime_verlog import ConfigError, MissingDependencyError, SlimeVerlogError

__all__ = [
    "ConfigError",
    "EnvironmentFault",
    "EpisodeOverError",
    "JudgeError",
    "MissingDependencyError",
    "SlimeVerlogError",
    "ToolError",
]


class EnvironmentFault(SlimeVerlogError, RuntimeError):
    """An environment broke (raised, hung or died); the agent did nothing wrong."""


class ToolError(SlimeVerlogError, RuntimeError):
    """A tool was registered wrongly, or broke while it ran."""


class JudgeError(SlimeVerlogError, RuntimeError):
    """The judge did not give a usable verdict."""


class EpisodeOverError(SlimeVerlogError, RuntimeError):
    """`step` was called before `reset` or after the episode's end."""
