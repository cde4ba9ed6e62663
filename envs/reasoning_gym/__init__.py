"""The generated questions of reasoning-gym, each with its own verifier; a task is the name of a generator."""

from envs.reasoning_gym.env import DEFAULT_TASK, SETTINGS, ReasoningGym, ReasoningGymSettings, build_env

__all__ = ["DEFAULT_TASK", "SETTINGS", "ReasoningGym", "ReasoningGymSettings", "build_env"]
