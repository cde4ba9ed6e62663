"""TextWorld: text adventures generated on demand from a theme, its parameters and the seed."""

from envs.textworld.env import DEFAULT_TASK, SETTINGS, TextWorld, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "TextWorld", "build_env", "expert_action", "explain_action"]
