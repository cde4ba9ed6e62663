"""Scripted players: an environment's expert, and one that acts at random. They play beside the environment."""

from __future__ import annotations

import random
from collections.abc import Callable

from envs.base import BaseInteractionEnv
from envs.errors import ConfigError
from envs.loading import load_env_module

WORDS = ("left", "go", "yes", "stop", "42", "open the door", "I do not know", "look")
"""Answers of the random player where an environment names no actions."""


def random_answer(env: BaseInteractionEnv, env_path: str, seed: int) -> str:
    """One of the environment's actions, or a short text if it names none."""
    return random.Random(seed).choice(list(env.actions) or list(WORDS))


def expert_answer(env: BaseInteractionEnv, env_path: str, seed: int) -> str:
    """The next action of the module's `expert_action(env)`.

    Raises:
        ConfigError: the module has none.
    """
    expert = getattr(load_env_module(env_path), "expert_action", None)
    if expert is None:
        raise ConfigError(f"{env_path} has no function expert_action(env), so there is no expert to play it")
    return expert(env)


PLAYERS: dict[str, Callable[[BaseInteractionEnv, str, int], str]] = {"random": random_answer, "expert": expert_answer}
