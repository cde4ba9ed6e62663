"""Agents as black boxes: any program that asks a model over HTTP is played and trained; each request is one turn."""

from envs.agent.env import SETTINGS, AgentEnv, AgentRun, build_env
from envs.agent.settings import AgentSettings

__all__ = ["SETTINGS", "AgentEnv", "AgentRun", "AgentSettings", "build_env"]
