"""Fixing bugs in a repository: the agent reads, edits and runs code with tools, and tests decide about the reward."""

from envs.swe.env import SETTINGS, SWEEnv, SWESettings, build_env

DEFAULT_TASK = "toolz_interleave"

__all__ = ["DEFAULT_TASK", "SETTINGS", "SWEEnv", "SWESettings", "build_env"]
