"""What the agent acts in: one file an environment, each with `build_env(sample, args)`."""

from envs.base import BaseInteractionEnv, Observation, StepInfo
from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError, MissingDependencyError

__all__ = [
    "BaseInteractionEnv",
    "ConfigError",
    "EnvironmentFault",
    "EpisodeOverError",
    "MissingDependencyError",
    "Observation",
    "StepInfo",
]
