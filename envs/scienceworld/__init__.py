"""ScienceWorld: 30 science tasks in a text world. The game runs in Java: one JVM per live episode."""

from envs.scienceworld.env import SETTINGS, ScienceWorld, ScienceWorldSettings, build_env

DEFAULT_TASK = "find-plant"
expert_action = ScienceWorld.advice

__all__ = ["DEFAULT_TASK", "SETTINGS", "ScienceWorld", "ScienceWorldSettings", "build_env", "expert_action"]
