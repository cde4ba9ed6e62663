"""Names and descriptions of the actions, and the translation of responses to actions."""

from __future__ import annotations

import re
from collections.abc import Iterable

from envs.crafter.world.rules import ACTION_NAMES, COLLECT, KIND_NAMES, MAKE, MOVES, PLACE, Amounts

_COMPASS = ("West", "East", "North", "South")


def _list(words: Iterable[str], last: str) -> str:
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def _name(item: str) -> str:
    return item.replace("_", " ")


def _cost(uses: Amounts) -> str:
    return _list([f"{count} {_name(item)}" for item, count in uses], "and")


def _describe_actions() -> dict[str, str]:
    effects = {
        "Noop": "let the step pass",
        "Do": "act on what you face: cut a tree, mine a rock, search grass, drink, hit a creature, eat a ripe plant",
        "Sleep": "fall asleep if your energy is not full; you sleep on until it is, or until something hurts you",
    }
    for move in MOVES:
        effects[move] = f"turn {move.split()[1].lower()}, and go one step if the way is free"
    for action, placing in PLACE.items():
        ground = _list([KIND_NAMES[material] for material in sorted(placing.where)], "or")
        effects[action] = f"put a {_name(placing.name)} on the cell you face, which must be {ground} with nothing on it"
        effects[action] += f"; takes {_cost(placing.uses)}"
    for action, making in MAKE.items():
        stations = _list([f"a {KIND_NAMES[station]}" for station in sorted(making.nearby)], "and")
        effects[action] = f"craft one right beside {stations}; takes {_cost(making.uses)}"
    return {action: effects[action] for action in ACTION_NAMES}


ACTIONS = _describe_actions()
"""Actions with their descriptions."""
TOOLS = {
    KIND_NAMES[material]: _list([_name(item) for item, _ in rule.needs], "and") if rule.needs else "no tool"
    for material, rule in COLLECT.items()
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
    **{f"{move} {count}": move for move in MOVES for count in ("1 Step", "2 Steps", "3 Steps")},
    **dict.fromkeys(_DO, "Do"),
    **{"Make Table": "Place Table", "Make Crafting Table": "Place Table", "Make Furnace": "Place Furnace"},
}
_BRACKETS = re.compile(r"\([^)]*\)")


def translate(answer: str, turn: int) -> str | None:
    """Map a response to an action, as Verlog does; None if it names no action.

    For a diagonal move Verlog picks one of the two directions at random. Here they alternate by `turn`, which keeps the
    episode deterministic.
    """
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
