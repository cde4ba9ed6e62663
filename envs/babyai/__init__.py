"""BabyAI as a text game: mixed local tasks, all levels that minigrid registers, and errands of chosen length."""

from envs.babyai.env import ACTIONS, DEFAULT_TASK, SETTINGS, BabyAI, BabyAISettings, build_env, expert_action

__all__ = ["ACTIONS", "DEFAULT_TASK", "SETTINGS", "BabyAI", "BabyAISettings", "build_env", "expert_action"]
