"""Crafter's rules as lookup tables, read from the `crafter` package."""

from dataclasses import dataclass
from typing import Any

from crafter import constants as _constants

constants: Any = _constants  # the package reads its attributes from a YAML file

SIZE = 64
"""Cells along each side of the world."""
STRIDE = 72
"""Cells from one column to the next in flat arrays; the margin stays 0, which means outside of the world."""
CHUNK = 12
"""Cells along each side of the regions whose numbers of creatures are regulated."""
LENGTH = 10_000
"""Steps after which Crafter itself ends an episode."""

MATERIAL_ID = {name: index for index, name in enumerate(constants.materials, start=1)}
_FIRST_BEING = len(MATERIAL_ID) + 1
PLAYER, COW, ZOMBIE, SKELETON, ARROW, PLANT = range(_FIRST_BEING, _FIRST_BEING + 6)
KIND_NAMES = ("nothing", *MATERIAL_ID, "player", "cow", "zombie", "skeleton", "arrow", "plant")
"""Names of what can be on a cell, by number: 0 outside, then the materials, then the beings."""

WALKABLE = frozenset(MATERIAL_ID[name] for name in constants.walkable)
ITEM_LIMITS = {name: item["max"] for name, item in constants.items.items()}
INITIAL_ITEMS = {name: item["initial"] for name, item in constants.items.items()}
VITALS = ("health", "food", "drink", "energy")
ACHIEVEMENTS = tuple(constants.achievements)

Amounts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Collecting:
    """Collecting a material with `Do`."""

    needs: Amounts
    gives: Amounts
    leaves: int
    probability: float


@dataclass(frozen=True)
class Placing:
    """Placing something in front of the player; `material` is None for a plant, which is a being."""

    name: str
    uses: Amounts
    where: frozenset[int]
    material: int | None


@dataclass(frozen=True)
class Making:
    """Crafting something next to a table or a furnace."""

    name: str
    uses: Amounts
    nearby: frozenset[int]
    gives: int


def _amounts(mapping: dict[str, int]) -> Amounts:
    return tuple(mapping.items())


def _ids(names: list[str]) -> frozenset[int]:
    return frozenset(MATERIAL_ID[name] for name in names)


COLLECT = {
    MATERIAL_ID[name]: Collecting(
        _amounts(rule["require"]), _amounts(rule["receive"]), MATERIAL_ID[rule["leaves"]], rule.get("probability", 1)
    )
    for name, rule in constants.collect.items()
}
PLACE = {
    f"Place {name.title()}": Placing(name, _amounts(rule["uses"]), _ids(rule["where"]), MATERIAL_ID.get(name))
    for name, rule in constants.place.items()
}
MAKE = {
    f"Make {name.replace('_', ' ').title()}": Making(name, _amounts(rule["uses"]), _ids(rule["nearby"]), rule["gives"])
    for name, rule in constants.make.items()
}
MOVES = {"Move West": (-1, 0), "Move East": (1, 0), "Move North": (0, -1), "Move South": (0, 1)}
ACTION_NAMES = ("Noop", *MOVES, "Do", "Sleep", *PLACE, *MAKE)
