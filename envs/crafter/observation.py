"""Describes the player's view, status and inventory in BALROG's words."""

from __future__ import annotations

from operator import itemgetter

from envs.crafter.world.rules import KIND_NAMES, PLAYER, STRIDE, VITALS
from envs.crafter.world.world import World

_COLUMNS, _ROWS = 9, 7
_MIDDLE_X, _MIDDLE_Y = _COLUMNS // 2, _ROWS // 2
_CELLS = [(x - _MIDDLE_X, y - _MIDDLE_Y) for x in range(_COLUMNS) for y in range(_ROWS)]
# The sort is stable: equally near cells stay in scan order.
_NEAREST_FIRST = sorted(range(len(_CELLS)), key=lambda index: abs(_CELLS[index][0]) + abs(_CELLS[index][1]))
_pick_nearest_first = itemgetter(*_NEAREST_FIRST)

_SLEEPING = "You are sleeping, and will not be able take actions until energy is full."
_DEAD = "You died."
_NOTHING_SEEN = "You see nothing away from you."


def _describe_place(dx: int, dy: int) -> str:
    sides = ["north"] * (dy < 0) + ["south"] * (dy > 0) + ["west"] * (dx < 0) + ["east"] * (dx > 0)
    steps = abs(dx) + abs(dy)
    return f"{steps} step{'s' if steps > 1 else ''} to your {'-'.join(sides)}"


_PLACES = [_describe_place(*_CELLS[index]) for index in _NEAREST_FIRST]


def describe(world: World) -> tuple[str, str]:
    """Return BALROG's two texts: (the surroundings, the player's status and inventory)."""
    player = world.player
    parts = [_SLEEPING + "\n\n"] if player.sleeping else [_DEAD + "\n\n"] if player.health <= 0 else []
    view = _crop(world)
    nearest_first = bytes(_pick_nearest_first(view))
    # The dict keeps the first occurrence of each kind, in order; 0 is outside of the world.
    lines = [
        f"- {KIND_NAMES[kind]} {_PLACES[nearest_first.index(kind)]}"
        for kind in dict.fromkeys(view)
        if kind and kind != PLAYER
    ]
    parts.append("You see:\n" + "\n".join(lines) if lines else _NOTHING_SEEN)
    dx, dy = player.facing
    front = view[(_MIDDLE_X + dx) * _ROWS + _MIDDLE_Y + dy]
    parts.append(f"You face {KIND_NAMES[front]} at your front.")
    return "\n\n".join(parts), describe_inventory(player.inventory)


def _crop(world: World) -> bytes:
    """Return the visible kinds, column by column; all 0 near the west and north border, as in BALROG."""
    x, y = world.player.x - _MIDDLE_X, world.player.y - _MIDDLE_Y
    if x < 0 or y < 0:
        return bytes(len(_CELLS))
    first = x * STRIDE + y
    kinds = world.kinds
    return b"".join([kinds[start : start + _ROWS] for start in range(first, first + _COLUMNS * STRIDE, STRIDE)])


def describe_inventory(inventory: dict[str, int]) -> str:
    """Return the vitals, out of 9, and the items carried."""
    status = "\n".join([f"- {vital}: {inventory[vital]}/9" for vital in VITALS])
    things = [f"- {name}: {count}" for name, count in inventory.items() if count and name not in VITALS]
    carried = "Your inventory:\n" + "\n".join(things) if things else "You have nothing in your inventory."
    return f"Your status:\n{status}\n\n{carried}"
