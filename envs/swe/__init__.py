"""Fixing bugs in a repository: the agent reads, edits and runs code with tools, and tests decide about the reward."""

from envs.swe.env import SETTINGS, SWEEnv, SWESettings, build_env

__all__ = ["SETTINGS", "SWEEnv", "SWESettings", "build_env"]
