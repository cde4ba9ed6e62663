"""Mending a repository: the agent reads, edits and runs through tools; hidden and known tests decide."""

from envs.swe.env import SWEEnv, SWEOptions, build_env

__all__ = ["SWEEnv", "SWEOptions", "build_env"]
