"""Crafter's rules by the names of BALROG's actions, read from the `crafter` package."""

from dataclasses import dataclass
from typing import Any

from crafter import constants as _constants

constants: Any = _constants  # the package reads its attributes from a YAML file

MATERIAL_ID = {name: index for index, name in enumerate(constants.materials, start=1)}
_FIRST_BEING = len(MATERIAL_ID) + 1
PLAYER, COW, ZOMBIE, SKELETON, ARROW, PLANT = range(_FIRST_BEING, _FIRST_BEING + 6)
KIND_NAMES = ("nothing", *MATERIAL_ID, "player", "cow", "zombie", "skeleton", "arrow", "plant")
"""Names of what can be on a cell, by their numbers in Crafter's semantic view: 0 outside,
materials, beings."""

WALKABLE = frozenset(MATERIAL_ID[name] for name in constants.walkable)
VITALS = ("health", "food", "drink", "energy")
ACHIEVEMENTS = tuple(constants.achievements)


@dataclass(frozen=True)
class Recipe:
    """What it takes to place or make something: items, materials it is placed on, and materials it
    is made beside."""

    name: str
    uses: dict[str, int]
    where: frozenset[int]
    nearby: frozenset[int]


def _recipes(verb: str, rules: dict[str, Any]) -> dict[str, Recipe]:
    recipes = {}
    for name, rule in rules.items():
        where, nearby = (
            frozenset(MATERIAL_ID[m] for m in rule.get(key, ())) for key in ("where", "nearby")
        )
        recipes[f"{verb} {name.replace('_', ' ').title()}"] = Recipe(
            name, rule["uses"], where, nearby
        )
    return recipes


PLACE = _recipes("Place", constants.place)
MAKE = _recipes("Make", constants.make)
MOVES = {"Move West": (-1, 0), "Move East": (1, 0), "Move North": (0, -1), "Move South": (0, 1)}
ACTION_NAMES = ("Noop", *MOVES, "Do", "Sleep", *PLACE, *MAKE)
"""BALROG's names of the actions, in the order of `constants.actions`."""
