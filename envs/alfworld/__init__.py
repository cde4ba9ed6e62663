"""ALFWorld: household tasks in text, from its data set."""

from envs.alfworld.env import DEFAULT_TASK, FAMILIES, SETTINGS, ALFWorld, build_env, expert_action, find_families

__all__ = ["DEFAULT_TASK", "FAMILIES", "SETTINGS", "ALFWorld", "build_env", "expert_action", "find_families"]
