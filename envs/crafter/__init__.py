"""Crafter as a text game, in BALROG's words."""

from envs.crafter.env import DEFAULT_TASK, SETTINGS, Crafter, CrafterSettings, build_env, expert_action, explain_action
from envs.crafter.vocabulary import ACTIONS

__all__ = [
    "ACTIONS",
    "DEFAULT_TASK",
    "SETTINGS",
    "Crafter",
    "CrafterSettings",
    "build_env",
    "expert_action",
    "explain_action",
]
