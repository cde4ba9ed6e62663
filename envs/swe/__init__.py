"""Mending a repository: the agent reads, edits and runs through tools; hidden and known tests decide."""

from envs.swe.env import SETTINGS, SWEEnv, SWESettings, build_env

__all__ = ["SETTINGS", "SWEEnv", "SWESettings", "build_env"]
