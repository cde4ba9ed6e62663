"""Recall: remember the first of many lights, over as many turns as you like."""

from envs.recall.env import DEFAULT_TASK, SETTINGS, Recall, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "Recall", "build_env", "expert_action", "explain_action"]
