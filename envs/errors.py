"""Errors that an environment raises, named by what went wrong; `rollout.errors` holds the whole model."""


class SlimeVerlogError(Exception):
    """Base of every error that this project raises on purpose; its text says what to do."""


class ConfigError(SlimeVerlogError, ValueError):
    """A setting is unknown, mistyped or impossible. The text names the key, the value and the fix."""


class MissingDependencyError(SlimeVerlogError, ImportError):
    """An optional package is needed and absent. The text names the command that installs it."""


class EnvironmentFault(SlimeVerlogError, RuntimeError):
    """An environment broke (raised, hung or died); the agent did nothing wrong."""


class ToolError(SlimeVerlogError, RuntimeError):
    """A tool was registered wrongly, or broke while it ran."""


class JudgeError(SlimeVerlogError, RuntimeError):
    """The judge did not give a usable verdict."""


class EpisodeOverError(SlimeVerlogError, RuntimeError):
    """`step` was called before `reset` or after the episode's end."""
