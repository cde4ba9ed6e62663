"""How far a BabyAI mission is from its object, for the shaped reward."""

from __future__ import annotations

from typing import Any

from envs.errors import ConfigError


def steps_to_object(game: Any) -> int:
    """Cells (walls ignored) from the agent to standing next to the nearest object that the mission names.

    Raises:
        ConfigError: the mission is not about one object, so there is no such distance.
    """
    description = getattr(game.instrs, "desc", None)
    if description is None:
        raise ConfigError(
            f"env.shaping pays the way to the object of one instruction (go to, pick up, open); {game.mission!r} has "
            "several, so leave env.shaping at 0"
        )
    if any(thing is game.carrying for thing in description.obj_set):
        return 0
    x, y = game.agent_pos
    distances = (abs(thing.cur_pos[0] - x) + abs(thing.cur_pos[1] - y) for thing in description.obj_set)
    return max(0, int(min(distances)) - 1)


def distance_left(game: Any) -> float:
    """0 next to the object, towards 1 in the far corner of the world."""
    return steps_to_object(game) / (game.width + game.height)
