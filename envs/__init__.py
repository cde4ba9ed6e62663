"""Environments for agents: one package each, with `build_env(sample, args)`; here, the interface and base classes."""

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
