"""BabaIsAI as a text game: BALROG's 40 tasks, without the original package."""

from envs.babaisai.env import DEFAULT_TASK, SETTINGS, BabaIsAI, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "BabaIsAI", "build_env", "expert_action", "explain_action"]
