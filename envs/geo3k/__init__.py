"""Geometry problems with images (geometry3k)."""

from envs.geo3k.env import SETTINGS, Geo3kSettings, build_env

__all__ = ["SETTINGS", "Geo3kSettings", "build_env"]
