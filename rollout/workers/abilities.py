"""Questions that are asked about an environment in its worker, with `EnvHost.ask`: what it offers,
what to answer."""

import random
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs import time_limit
from envs.base import BaseInteractionEnv
from envs.errors import ConfigError, EnvironmentFault, warned
from envs.loading import checked_text, finish, load_env_module
from rollout.spec import EnvSpec

WORDS = ("left", "go", "yes", "stop", "42", "open the door", "I do not know", "look")
"""Responses of the random player where an environment names no actions."""


@dataclass(frozen=True)
class Abilities:
    """What an environment offers."""

    actions: tuple[str, ...]
    """Its named actions."""
    has_expert: bool
    max_steps: int
    """Steps after which it truncates the episode; 0 for no limit."""
    warnings: tuple[str, ...] = ()
    """What the package's environments have warned of in this process."""


def abilities(env: BaseInteractionEnv, spec: EnvSpec) -> Abilities:
    """What a built environment offers; raises EnvironmentFault unless its actions are texts."""
    actions = env.actions
    listed = isinstance(actions, Mapping | Sequence) and not isinstance(actions, str)
    if not listed or not all(isinstance(action, str) for action in actions):
        raise EnvironmentFault(
            "actions must be a list of texts, or map them to descriptions, got "
            f"{reprlib.repr(actions)}"
        )
    has_expert = hasattr(load_env_module(spec.env_path), "expert_action")
    return Abilities(tuple(actions), has_expert, env.max_steps or 0, tuple(warned))


def suggest(
    env: BaseInteractionEnv, spec: EnvSpec, player: str, seed: int, explain: bool = False
) -> str:
    """The next response of the player `random` or `expert`; raises ConfigError without an expert.

    With `explain`, the expert is also asked for its reasoning, as imitation does, to find mistakes
    there.
    """
    if player == "random":
        return random.Random(seed).choice(list(env.actions) or list(WORDS))
    module = load_env_module(spec.env_path)
    if not hasattr(module, "expert_action"):
        raise ConfigError(
            f"{spec.env_path} has no function expert_action(env), so there is no expert to play it"
        )
    answer = checked_text(finish(module.expert_action(env)), module.expert_action)
    if explain and hasattr(module, "explain_action"):
        checked_text(finish(module.explain_action(env)), module.explain_action)
    return answer


def tools(env: Any, spec: EnvSpec) -> list[tuple[str, bool, str]]:
    """Call each tool once and grade the reference answer, after a reset: names, whether it worked,
    what came."""
    if not hasattr(env, "call_once"):
        # No ToolEnv; other environments need not import what tools need.
        return []
    from envs.tools.tryout import try_tools

    return [(found.name, found.worked, found.detail) for found in try_tools(env)]


def draw(env: BaseInteractionEnv, spec: EnvSpec) -> str:
    """Draw the state as the viewer does; empty without `render`. Raises EnvironmentFault for
    another drawing."""
    render = getattr(env, "render", None)
    if not callable(render):
        return ""
    drawn = finish(render())
    shape = getattr(drawn, "shape", ())
    if len(shape) != 3 or shape[2] != 3 or str(getattr(drawn, "dtype", "")) != "uint8":
        said = f"render returned {reprlib.repr(drawn)}"
        raise EnvironmentFault(
            f"{said}; return a uint8 array (height, width, 3), or leave render out"
        )
    return f"draws {shape[1]} x {shape[0]} pixels"


def threads(env: object, spec: object) -> list[str]:
    """Names of the threads that run in this process, without those that limit its commands."""
    return [thread.name for thread in threading.enumerate() if thread.name != time_limit.THREAD]
