"""BabaIsAI as a text game: BALROG's 40 tasks, without the original package."""

from envs.babaisai.env import ACTIONS, DEFAULT_TASK, SETTINGS, BabaIsAI, build_env, expert_action, explain_action

__all__ = ["ACTIONS", "DEFAULT_TASK", "SETTINGS", "BabaIsAI", "build_env", "expert_action", "explain_action"]
