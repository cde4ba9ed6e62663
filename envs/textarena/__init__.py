"""Adapter to TextArena: its single-player games, by their ids."""

from envs.textarena.env import DEFAULT_TASK, MAX_CHARACTERS, SETTINGS, TextArena, TextArenaSettings, build_env

__all__ = ["DEFAULT_TASK", "MAX_CHARACTERS", "SETTINGS", "TextArena", "TextArenaSettings", "build_env"]
