"""Describes the actions and what the player sees in BALROG's words, and translates responses to
actions."""

import re
from collections.abc import Iterable
from operator import itemgetter

from envs.crafter import rules
from envs.crafter.world import STRIDE, World


def _list(words: Iterable[str], last: str) -> str:
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def _name(item: str) -> str:
    return item.replace("_", " ")


def _cost(recipe: rules.Recipe) -> str:
    counts = [f"{count} {_name(item)}" for item, count in recipe.uses.items()]
    return _list(counts, "and")


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
        where = f"on the cell you face, which must be {ground} with nothing on it"
        effects[action] = f"put a {_name(placing.name)} {where}; takes {_cost(placing)}"
    for action, making in rules.MAKE.items():
        stations = _list(
            [f"a {rules.KIND_NAMES[station]}" for station in sorted(making.nearby)], "and"
        )
        effects[action] = f"craft one right beside {stations}; takes {_cost(making)}"
    return {action: effects[action] for action in rules.ACTION_NAMES}


ACTIONS = _describe_actions()
"""Actions with their descriptions."""
TOOLS = {
    material: _list(map(_name, rule["require"] or ["no_tool"]), "and")
    for material, rule in rules.constants.collect.items()
}
"""Tool needed to collect each material."""

_DIAGONAL = re.compile(r"(Move (?:North|South))(?:[ -](West|East)|(west|east))")
_DO = (
    *("Collect Stone", "Collect Wood", "Collect Coal", "Collect Iron", "Collect Sapling"),
    *("Mine", "Mine Stone", "Mine Coal", "Cut", "Cut Tree"),
    *("Chop", "Chop Tree", "Chop Trees", "Chop_Tree"),
    *("Drink", "Drink From Water", "Drink From Lakes"),
    *("Attack", "Defeat Zombie", "Defeat Skeleton", "Eat Cow"),
)
_SYNONYMS = dict.fromkeys(_DO, "Do")
_SYNONYMS |= {
    "Make Table": "Place Table",
    "Make Crafting Table": "Place Table",
    "Make Furnace": "Place Furnace",
}
for _move in rules.MOVES:
    _SYNONYMS |= dict.fromkeys((f"{_move} 1 Step", f"{_move} 2 Steps", f"{_move} 3 Steps"), _move)
_BRACKETS = re.compile(r"\([^)]*\)")


def translate(answer: str, turn: int) -> str | None:
    """Map a response to an action as Verlog does, or None; `turn` picks a diagonal's side, which
    Verlog draws."""
    line, newline, _ = answer.partition("\n")
    words = line.lower().title()
    words = words.strip() if newline else words
    words = words[:-1] if words.endswith((".", ",")) else words
    if diagonal := _DIAGONAL.fullmatch(words):
        vertical, apart, joined = diagonal.groups()
        return f"Move {(apart or joined).title()}" if turn % 2 else vertical
    words = _SYNONYMS.get(words, words)
    if "Do" in words and "(" in words:
        # Search only up to the last ")": unclosed brackets after it would take quadratic time.
        closed, bracket, rest = words.rpartition(")")
        words = (_BRACKETS.sub("", closed + bracket) + rest).strip()
    return words if words in ACTIONS else None


_COLUMNS = 9
_ROWS = 7
_MIDDLE_X = _COLUMNS // 2
_MIDDLE_Y = _ROWS // 2
_OFFSETS = [divmod(index, _ROWS) for index in range(_COLUMNS * _ROWS)]
_CELLS = [(column - _MIDDLE_X, row - _MIDDLE_Y) for column, row in _OFFSETS]
_DISTANCES = [abs(dx) + abs(dy) for dx, dy in _CELLS]
# The sort is stable: equally near cells stay in scan order.
_NEAREST_FIRST = sorted(range(len(_CELLS)), key=_DISTANCES.__getitem__)
_pick_nearest_first = itemgetter(*_NEAREST_FIRST)

_SLEEPING = "You are sleeping, and will not be able take actions until energy is full."
_DEAD = "You died."
_NOTHING_SEEN = "You see nothing away from you."


def _describe_place(dx: int, dy: int) -> str:
    sides = {"north": dy < 0, "south": dy > 0, "west": dx < 0, "east": dx > 0}
    steps = abs(dx) + abs(dy)
    place = "-".join(side for side, there in sides.items() if there)
    return f"{steps} step{'s' if steps > 1 else ''} to your {place}"


_PLACES = [_describe_place(*_CELLS[index]) for index in _NEAREST_FIRST]


def describe(world: World) -> tuple[str, str]:
    """Return BALROG's two texts: (the surroundings, the player's status and inventory)."""
    player = world.player
    parts = []
    if player.sleeping or player.health <= 0:
        parts.append(f"{_SLEEPING if player.sleeping else _DEAD}\n\n")
    view = _crop(world)
    nearest_first = bytes(_pick_nearest_first(view))
    lines = []
    for kind in dict.fromkeys(view):
        # Kinds come in the order of their first occurrences; 0 is outside of the world.
        if kind and kind != rules.PLAYER:
            lines.append(f"- {rules.KIND_NAMES[kind]} {_PLACES[nearest_first.index(kind)]}")
    parts.append("You see:\n" + "\n".join(lines) if lines else _NOTHING_SEEN)
    dx, dy = player.facing
    front = view[(_MIDDLE_X + dx) * _ROWS + _MIDDLE_Y + dy]
    parts.append(f"You face {rules.KIND_NAMES[front]} at your front.")
    status = ["Your status:"]
    things = ["Your inventory:"]
    for name, count in player.inventory.items():
        if name in rules.VITALS:
            status.append(f"- {name}: {count}/9")
        elif count:
            things.append(f"- {name}: {count}")
    carried = "\n".join(things) if things[1:] else "You have nothing in your inventory."
    return "\n\n".join(parts), "\n".join(status) + f"\n\n{carried}"


def _crop(world: World) -> bytes:
    """Return the visible kinds, column by column; all 0 near the west and north border, as in
    BALROG."""
    x, y = world.player.pos.tolist()
    x = x - _MIDDLE_X
    y = y - _MIDDLE_Y
    if x < 0 or y < 0:
        return bytes(len(_CELLS))
    first = x * STRIDE + y
    starts = range(first, first + _COLUMNS * STRIDE, STRIDE)
    return b"".join([world.kinds[start : start + _ROWS] for start in starts])
