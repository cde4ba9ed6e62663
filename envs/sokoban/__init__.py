"""Sokoban: push every box onto a target, in levels that are drawn from the seed or read from files."""

from envs.sokoban.env import DEFAULT_TASK, SETTINGS, Sokoban, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "Sokoban", "build_env", "expert_action", "explain_action"]
