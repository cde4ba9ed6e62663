"""Tasks in Harbor's format (Terminal-Bench 2 and others): work in a shell, rewarded by the tests of the task."""

from envs.harbor.env import HarborEnv, build_env
from envs.harbor.reference import expert_action
from envs.harbor.settings import HarborSettings

SETTINGS = HarborSettings
DEFAULT_TASK = "count-errors"

__all__ = ["DEFAULT_TASK", "SETTINGS", "HarborEnv", "HarborSettings", "build_env", "expert_action"]
