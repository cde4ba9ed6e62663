"""Questions about one coloured shape in a small image (PyPI's easy-vqa): a VLM environment for a laptop."""

from envs.easy_vqa.env import DEFAULT_TASK, SETTINGS, EasyVQASettings, build_env

__all__ = ["DEFAULT_TASK", "SETTINGS", "EasyVQASettings", "build_env"]
