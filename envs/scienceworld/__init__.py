"""ScienceWorld: 30 science tasks in a text world. The game runs in Java: one JVM per live episode."""

from envs.scienceworld.env import DEFAULT_TASK, SETTINGS, ScienceWorld, build_env, expert_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "ScienceWorld", "build_env", "expert_action"]
