"""Tools for the model: `@tool` functions and `Tool` classes, and the environment that offers
them."""

from envs.tools.env import SETTINGS, ToolEnv, build_env
from envs.tools.registry import load_tools, make_tool, tool
from envs.tools.results import Tool, ToolEpisode, ToolResult, ToolSpec
from envs.tools.settings import ToolSettings

__all__ = [
    "SETTINGS",
    "Tool",
    "ToolEnv",
    "ToolEpisode",
    "ToolResult",
    "ToolSettings",
    "ToolSpec",
    "build_env",
    "load_tools",
    "make_tool",
    "tool",
]
