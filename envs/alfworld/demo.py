"""Makes demo games: small rooms drawn from a seed, in the format of ALFWorld's games.

Domain, grammar, goals and possible places of objects come from the alfworld package; only the rooms are drawn here.
Every game starts unsolved, with everything that its goal needs in the room.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alfworld.gen.constants as constants
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from envs.alfworld.data import read_rooms

NOTICE = "[Demo game: a room built from ALFWorld's grammar, not a game of the ALFWorld data set.]"


@dataclass(frozen=True)
class Scene:
    """Kinds of receptacles with the maximum number of each, and kinds of objects."""

    receptacles: Mapping[str, int]
    objects: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Needs of a task family: its scenes, the property of its object, an appliance, and the number of objects."""

    scenes: tuple[Scene, ...]
    needs: str | None = None
    appliance: str | None = None
    copies: int = 1
    lamp: bool = False


def _load_families() -> dict[str, Family]:
    data = read_rooms()
    scenes = {name: Scene(scene["receptacles"], tuple(scene["objects"])) for name, scene in data["scenes"].items()}
    return {
        name: Family(**{**family, "scenes": tuple(scenes[scene] for scene in family["scenes"])})
        for name, family in data["families"].items()
    }


FAMILIES = _load_families()
_STATES = {"Heatable": "heatable", "Coolable": "coolable", "Cleanable": "cleanable"}


def make_demo_game(family: str, seed: int) -> dict[str, Any]:
    """Return the game of this family and seed, in the format of ALFWorld's `game.tw-pddl` files."""
    rng = random.Random(f"{family}/{seed}")
    rules, goal = FAMILIES[family], gdict[family]
    scene = rng.choice(rules.scenes)
    target, place = rng.choice(_goals(rules, scene))
    receptacles = [f"{kind}_{n}" for kind, most in scene.receptacles.items() for n in range(rng.randint(1, most))]
    objects = _place(rules, scene, target, place, receptacles, rng)
    names = {"obj": target, "recep": place, "toggle": "DeskLamp", "mrecep": ""}
    task = rng.choice(goal["templates"]).format(**{key: value.lower() for key, value in names.items()})
    return {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(encoding="utf-8"),
        "grammar": Path(ALFRED_TWL2_PATH).read_text(encoding="utf-8").replace("UNKNOWN GOAL", task),
        "pddl_problem": _write_problem(receptacles, objects, goal["pddl"].format(**names).replace("#", "-")),
    }


def _holders(kind: str, scene: Scene) -> list[str]:
    """Return the kinds of receptacles of the scene that can hold this kind of object."""
    return [place for place in scene.receptacles if kind in constants.VAL_RECEPTACLE_OBJECTS.get(place, ())]


def _goals(rules: Family, scene: Scene) -> list[tuple[str, str]]:
    """Return the possible tasks as (kind of object, kind of receptacle); the object can also start elsewhere."""
    allowed = constants.VAL_ACTION_OBJECTS[rules.needs] if rules.needs else scene.objects
    return [
        (kind, place)
        for kind in scene.objects
        if kind in allowed
        for place in _holders(kind, scene)
        if place != rules.appliance and len(_holders(kind, scene)) > 1
    ]


def _place(
    rules: Family, scene: Scene, target: str, place: str, receptacles: list[str], rng: random.Random
) -> list[tuple[str, str]]:
    """Draw pairs of object and receptacle; no object of the target's kind starts in its destination."""
    others = [kind for kind in scene.objects if kind != target and _holders(kind, scene)]
    kinds = [target] * (rules.copies + rng.randint(0, 1)) + rng.sample(others, k=min(len(others), rng.randint(5, 9)))
    placed = []
    for number, kind in enumerate(kinds):
        spots = [spot for spot in receptacles if _kind(spot) in _holders(kind, scene)]
        if kind == target:
            spots = [spot for spot in spots if _kind(spot) != place]
        placed.append((f"{kind}_{number}", rng.choice(spots)))
    if rules.lamp:
        spots = [spot for spot in receptacles if _kind(spot) in ("Desk", "SideTable")]
        placed.append(("DeskLamp_0", rng.choice(spots)))
    return placed


def _kind(name: str) -> str:
    return name.rsplit("_", 1)[0]


def _identifier(name: str) -> str:
    """Return the name in ALFRED's format, which ALFWorld shows as "mug 1"; a basin is a part of its sink."""
    kind, _, number = name.rpartition("_")
    return f"Sink_bar_{number}_bar_SinkBasin" if kind == "SinkBasin" else f"{kind}_bar_{number}"


def _write_problem(receptacles: list[str], objects: list[tuple[str, str]], goal: str) -> str:
    places = {name: f"loc{number}" for number, name in enumerate(receptacles, start=1)}
    kinds = sorted({_kind(name) for name, _ in objects})
    declared = ["agent1 - agent", "loc0 - location", *(f"{place} - location" for place in places.values())]
    declared += [f"{_identifier(name)} - receptacle" for name in receptacles]
    declared += [f"{_identifier(name)} - object" for name, _ in objects]
    declared += [f"{kind}Type - rtype" for kind in sorted({_kind(name) for name in receptacles})]
    declared += [f"{kind}Type - otype" for kind in kinds]
    facts = ["= (total-cost) 0", "atLocation agent1 loc0"]
    for name, place in places.items():
        facts += [f"receptacleAtLocation {_identifier(name)} {place}"]
        facts += [f"receptacleType {_identifier(name)} {_kind(name)}Type"]
        facts += [f"openable {_identifier(name)}"] if _kind(name) in constants.OPENABLE_CLASS_SET else []
        held = constants.VAL_RECEPTACLE_OBJECTS.get(_kind(name), ())
        facts += [f"canContain {_kind(name)}Type {kind}Type" for kind in kinds if kind in held]
    for name, spot in objects:
        facts += _object_facts(name, spot, places[spot])
    unique = list(dict.fromkeys(facts))
    lines = [f"    {line}" for line in declared] + [" )", " (:init"] + [f"    ({fact})" for fact in unique]
    return "\n".join(["(define (problem demo)", " (:domain alfred)", " (:objects", *lines, " )", goal])


def _object_facts(name: str, spot: str, place: str) -> list[str]:
    item, kind = _identifier(name), _kind(name)
    facts = [f"objectType {item} {kind}Type", f"inReceptacle {item} {_identifier(spot)}"]
    facts += [f"objectAtLocation {item} {place}"]
    if kind == "DeskLamp":
        return [*facts, f"toggleable {item}"]
    facts += [f"{word} {item}" for state, word in _STATES.items() if kind in constants.VAL_ACTION_OBJECTS[state]]
    return [*facts, f"pickupable {item}"]
