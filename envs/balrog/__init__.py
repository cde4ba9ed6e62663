"""Adapter to the BALROG package: any task of its six families, made by its own `make_env`."""

from envs.balrog.env import INSTALL, SETTINGS, Balrog, BalrogSettings, build_env

__all__ = ["INSTALL", "SETTINGS", "Balrog", "BalrogSettings", "build_env"]
