"""Distance from the agent to the object of a BabyAI mission, for the shaping reward."""

from __future__ import annotations

from typing import Any

from envs.errors import ConfigError


def steps_to_object(game: Any) -> int:
    """Steps, ignoring walls, until the agent stands next to the nearest object that the mission names.

    Raises:
        ConfigError: the mission has several instructions.
    """
    description = getattr(game.instrs, "desc", None)
    if description is None:
        raise ConfigError(
            f"env.shaping needs a mission with one object (go to, pick up, open), but {game.mission!r} has several; "
            "set env.shaping to 0"
        )
    if any(thing is game.carrying for thing in description.obj_set):
        return 0
    x, y = game.agent_pos
    distances = (abs(thing.cur_pos[0] - x) + abs(thing.cur_pos[1] - y) for thing in description.obj_set)
    return max(0, int(min(distances)) - 1)


def distance_left(game: Any) -> float:
    """Return 0 next to the object, close to 1 in the far corner of the world."""
    return steps_to_object(game) / (game.width + game.height)
