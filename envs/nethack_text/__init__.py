"""NetHack and MiniHack in words, for `envs.gymnasium_text`: `make` is its `env.id`, `describe` its `env.describe`."""

from envs.nethack_text.game import NetHackText, describe, make

__all__ = ["NetHackText", "describe", "make"]
