"""Describes the actions and what the player sees in BALROG's words, and translates responses to actions."""

import re
from collections.abc import Iterable
from operator import itemgetter

from envs.crafter import rules
from envs.crafter.world import STRIDE, World

_COMPASS = ("West", "East", "North", "South")


def _list(words: Iterable[str], last: str) -> str:
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def _name(item: str) -> str:
    return item.replace("_", " ")


def _cost(uses: dict[str, int]) -> str:
    return _list([f"{count} {_name(item)}" for item, count in uses.items()], "and")


def _describe_actions() -> dict[str, str]:
    effects = {
        "Noop": "let the step pass",
        "Do": "act on what you face: cut a tree, mine a rock, search grass, drink, hit a creature, eat a ripe plant",
        "Sleep": "fall asleep if your energy is not full; you sleep on until it is, or until something hurts you",
    }
    for move in rules.MOVES:
        effects[move] = f"turn {move.split()[1].lower()}, and go one step if the way is free"
    for action, placing in rules.PLACE.items():
        ground = _list([rules.KIND_NAMES[material] for material in sorted(placing.where)], "or")
        effects[action] = f"put a {_name(placing.name)} on the cell you face, which must be {ground} with nothing on it"
        effects[action] += f"; takes {_cost(placing.uses)}"
    for action, making in rules.MAKE.items():
        stations = _list([f"a {rules.KIND_NAMES[station]}" for station in sorted(making.nearby)], "and")
        effects[action] = f"craft one right beside {stations}; takes {_cost(making.uses)}"
    return {action: effects[action] for action in rules.ACTION_NAMES}


ACTIONS = _describe_actions()
"""Actions with their descriptions."""
TOOLS = {
    material: _list([_name(item) for item in rule["require"]], "and") if rule["require"] else "no tool"
    for material, rule in rules.constants.collect.items()
}
"""Tool needed to collect each material."""

_DIAGONALS = {
    f"Move {vertical}{joined}": (f"Move {vertical}", f"Move {horizontal}")
    for vertical in _COMPASS[2:]
    for horizontal in _COMPASS[:2]
    for joined in (f" {horizontal}", f"-{horizontal}", horizontal.lower())
}
_DO = (
    *("Collect Stone", "Collect Wood", "Collect Coal", "Collect Iron", "Collect Sapling"),
    *("Mine", "Mine Stone", "Mine Coal", "Cut", "Cut Tree"),
    *("Chop", "Chop Tree", "Chop Trees", "Chop_Tree"),
    *("Drink", "Drink From Water", "Drink From Lakes"),
    *("Attack", "Defeat Zombie", "Defeat Skeleton", "Eat Cow"),
)
_SYNONYMS = {
    **{f"{move} {count}": move for move in rules.MOVES for count in ("1 Step", "2 Steps", "3 Steps")},
    **dict.fromkeys(_DO, "Do"),
    **{"Make Table": "Place Table", "Make Crafting Table": "Place Table", "Make Furnace": "Place Furnace"},
}
_BRACKETS = re.compile(r"\([^)]*\)")


def translate(answer: str, turn: int) -> str | None:
    """Map a response to an action as Verlog does, or None; `turn` picks a diagonal's side, which Verlog draws."""
    line, newline, _ = answer.partition("\n")
    words = line.lower().title()
    words = words.strip() if newline else words
    words = words[:-1] if words.endswith((".", ",")) else words
    if words in _DIAGONALS:
        return _DIAGONALS[words][turn % 2]
    words = _SYNONYMS.get(words, words)
    if "Do" in words and "(" in words:
        # Search only up to the last ")": unclosed brackets after it would take quadratic time.
        closed, bracket, rest = words.rpartition(")")
        words = (_BRACKETS.sub("", closed + bracket) + rest).strip()
    return words if words in ACTIONS else None


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
        f"- {rules.KIND_NAMES[kind]} {_PLACES[nearest_first.index(kind)]}"
        for kind in dict.fromkeys(view)
        if kind and kind != rules.PLAYER
    ]
    parts.append("You see:\n" + "\n".join(lines) if lines else _NOTHING_SEEN)
    front = view[(_MIDDLE_X + player.facing[0]) * _ROWS + _MIDDLE_Y + player.facing[1]]
    parts.append(f"You face {rules.KIND_NAMES[front]} at your front.")
    inventory = player.inventory
    status = "\n".join([f"- {vital}: {inventory[vital]}/9" for vital in rules.VITALS])
    things = [f"- {name}: {count}" for name, count in inventory.items() if count and name not in rules.VITALS]
    carried = "Your inventory:\n" + "\n".join(things) if things else "You have nothing in your inventory."
    return "\n\n".join(parts), f"Your status:\n{status}\n\n{carried}"


def _crop(world: World) -> bytes:
    """Return the visible kinds, column by column; all 0 near the west and north border, as in BALROG."""
    x, y = world.player.pos.tolist()
    x, y = x - _MIDDLE_X, y - _MIDDLE_Y
    if x < 0 or y < 0:
        return bytes(len(_CELLS))
    first = x * STRIDE + y
    starts = range(first, first + _COLUMNS * STRIDE, STRIDE)
    return b"".join([world.kinds[start : start + _ROWS] for start in starts])
