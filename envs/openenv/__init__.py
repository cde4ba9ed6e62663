"""Environments of OpenEnv servers, over their WebSocket protocol and with the package websockets alone."""

from typing import Any

from envs.base import BaseInteractionEnv, describe_task, read_env_settings
from envs.openenv.game import OpenEnvGame, OpenEnvTools
from envs.openenv.protocol import CALL_TOOL
from envs.openenv.session import action_schema, fields_of
from envs.openenv.settings import OpenEnvSettings

__all__ = ["DEFAULT_TASK", "SETTINGS", "OpenEnvGame", "OpenEnvSettings", "OpenEnvTools", "build_env"]

SETTINGS = OpenEnvSettings
DEFAULT_TASK = "default"


def build_env(sample: Any, args: Any) -> BaseInteractionEnv:
    """Build the environment for the task and seed in `sample.metadata`, with the settings in `args.env`.

    Asks a server for its schema, which decides whether the model acts or calls tools; raises EnvironmentFault if none
    answers, or if the schema has changed since the first episode of this process.
    """
    task, seed = describe_task(sample)
    settings = read_env_settings(OpenEnvSettings, args)
    schema = action_schema(settings, seed)
    fields = fields_of(schema)
    calls_tools = not fields or (fields.get("type", {}).get("const") == CALL_TOOL and "tool_name" in fields)
    if settings.action == "tools" or (settings.action == "auto" and calls_tools):
        return OpenEnvTools(settings, task, seed)
    return OpenEnvGame(schema, settings, task, seed)
