"""Adapter to any gymnasium environment whose observations can be put into text."""

from envs.gymnasium_text.env import SETTINGS, GymnasiumSettings, GymnasiumText, build_env

__all__ = ["SETTINGS", "GymnasiumSettings", "GymnasiumText", "build_env"]
