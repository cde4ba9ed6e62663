"""Sokoban: push every box onto a target, in levels that are drawn from the seed or read from files."""

from envs.sokoban.env import SETTINGS, Sokoban, SokobanSettings, build_env

DEFAULT_TASK = "one_box"
expert_action = Sokoban.advice
explain_action = Sokoban.explain

__all__ = [
    "DEFAULT_TASK",
    "SETTINGS",
    "Sokoban",
    "SokobanSettings",
    "build_env",
    "expert_action",
    "explain_action",
]
