"""Crafter as a text game, in BALROG's words."""

from envs.crafter.env import DEFAULT_TASK, SETTINGS, Crafter, CrafterSettings, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "Crafter", "CrafterSettings", "build_env", "expert_action", "explain_action"]
