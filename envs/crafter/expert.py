"""A scripted player for demonstrations, which stays alive and works towards a diamond.

It knows the whole map. Every turn it decides from the current world alone, so its advice need not
be followed.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crafter.objects import Plant, Skeleton, Zombie

from envs.crafter.rules import (
    COW,
    MAKE,
    MATERIAL_ID,
    MOVES,
    PLACE,
    SKELETON,
    WALKABLE,
    ZOMBIE,
    Recipe,
    constants,
)
from envs.crafter.world import STRIDE, World, cell_of

STEPS = dict(zip(MOVES, (-STRIDE, STRIDE, -1, 1), strict=True))
"""Offset of each move in the flat arrays."""
FOES = (ZOMBIE, SKELETON)
_GRASS, _WATER, _TABLE, _FURNACE = (
    MATERIAL_ID[name] for name in ("grass", "water", "table", "furnace")
)
_DIG = 2
_BRIDGE = 4
_BEING = 4
_FENCE = 20


def front(world: World) -> int:
    """Return the cell that the player faces."""
    dx, dy = world.player.facing
    return cell_of(world.player) + dx * STRIDE + dy


def _plants(world: World) -> list[Plant]:
    return [being for being in world.beings if isinstance(being, Plant)]


def find_way(
    world: World, is_goal: Callable[[int], bool], farthest: int = 200
) -> tuple[str, int] | None:
    """Return first move and cost of the cheapest way to a goal cell, walked, dug or bridged; None
    without one."""
    items = world.player.inventory
    # Steps to enter a cell of each kind. Kinds that are missing are closed.
    entry_of = {COW: _BEING, ZOMBIE: _BEING, SKELETON: _BEING}
    for material, rule in constants.collect.items():
        has_tools = all(items[name] >= count for name, count in rule["require"].items())
        if has_tools and rule["leaves"] in constants.walkable:
            entry_of[MATERIAL_ID[material]] = _DIG
    if items["wood_pickaxe"] and items["stone"]:
        entry_of[_WATER] = _BRIDGE
    entry_of |= dict.fromkeys(WALKABLE, 1)
    fences = {cell_of(plant) + step for plant in _plants(world) for step in STEPS.values()}
    start = cell_of(world.player)
    kinds = world.kinds
    queue: list[tuple[int, int, str]] = [(0, start, "")]
    done: set[int] = set()
    entries: dict[int, int | None] = {start: 0}
    goals = set()
    while queue:
        cost, cell, first = heapq.heappop(queue)
        if cell in goals:
            return first, cost
        if cell in done:
            continue
        done.add(cell)
        for move, offset in STEPS.items():
            target = cell + offset
            if target not in entries:
                entry = entry_of.get(kinds[target])
                if is_goal(target):
                    goals.add(target)
                    entry = 1
                elif target in fences and entry == _DIG:
                    entry = _FENCE
                entries[target] = entry
            entry = entries[target]
            if entry is not None and target not in done and cost + entry <= farthest:
                heapq.heappush(queue, (cost + entry, target, first or move))
    return None


def reach(world: World, is_goal: Callable[[int], bool], farthest: int = 200) -> str | None:
    """Return the next action towards a goal cell, or `Do` in front of it; None without a path."""
    way = find_way(world, is_goal, farthest)
    if way is None:
        return None
    target = cell_of(world.player) + STEPS[way[0]]
    if world.is_free(target) or front(world) != target:
        return way[0]
    return "Place Stone" if world.kinds[target] == _WATER and not is_goal(target) else "Do"


def reach_kind(world: World, *kinds: int, farthest: int = 200) -> str | None:
    """Return the next action to reach and use the nearest material or being of these kinds."""
    if not any(kind in world.kinds for kind in kinds):
        return None
    return reach(world, lambda cell: world.kinds[cell] in kinds, farthest)


def act_before(
    world: World, action: str, is_wanted: Callable[[int, int], bool], farthest: int = 200
) -> str | None:
    """Return `action` where `is_wanted(stand, ahead)`, else the next move to such a free cell
    ahead, or None."""
    player = world.player

    def fits(stand: int, ahead: int) -> bool:
        return world.is_free(ahead) and is_wanted(stand, ahead)

    def last_move(start: int) -> str | None:
        for move, step in STEPS.items():
            stand = start + step
            if world.is_free(stand) and fits(stand, stand + step):
                return move
        return None

    def is_start(cell: int) -> bool:
        return world.is_free(cell) and last_move(cell) is not None

    if fits(cell_of(player), front(world)):
        return action
    return last_move(cell_of(player)) or reach(world, is_start, farthest)


_Goal = Callable[[World], str | None]

_TABLE_ONLY = frozenset({_TABLE})
SOURCE = {"wood": MATERIAL_ID["tree"]} | {
    name: MATERIAL_ID[name] for name in ("stone", "coal", "iron", "diamond")
}
"""Number of the material that each item is collected from."""
_AROUND = tuple(dx * STRIDE + dy for dx in (-1, 0, 1) for dy in (-1, 0, 1))
_SOLID = frozenset(
    MATERIAL_ID[name] for name in ("stone", "coal", "iron", "diamond", "table", "furnace", "tree")
)
_NEAR = 25
"""Steps up to which the player goes back to a table or furnace instead of building another."""


def decide(world: World) -> tuple[str | None, str]:
    """Return the name and action of the most urgent goal that applies, or (None, "Noop")."""
    goals = ((name, act(world)) for name, act in _GOALS.items())
    return next(((name, action) for name, action in goals if action is not None), (None, "Noop"))


def _drink(world: World) -> str | None:
    drink = world.player.inventory["drink"]
    if drink <= _low(world) or (drink < 9 and world.kinds[front(world)] == _WATER):
        return reach_kind(world, _WATER)
    return None


def _eat(world: World) -> str | None:
    ripe = {cell_of(plant) for plant in _plants(world) if plant.ripe}
    if ripe:
        return reach(world, lambda cell: cell in ripe)
    return reach_kind(world, COW) if world.player.inventory["food"] <= _low(world) else None


def _low(world: World) -> int:
    """Return the level at which to eat or drink; it is lower at night."""
    return 5 if world.daylight > 0.6 else 2


def _rest(world: World) -> str | None:
    """Sleep when tired, hurt or at night, walled in; in the open only in daylight with no foe
    near."""
    player = world.player
    energy = player.inventory["energy"]
    health = player.health
    dark = world.daylight < 0.5
    foes = [
        being
        for being in world.beings
        if isinstance(being, Zombie | Skeleton) and player.distance(being) <= 10
    ]
    walled_in = len(_room(world, cell_of(player))) <= 3
    first_nap = energy < 9 and not player.achievements["wake_up"] and not dark
    if not (first_nap or dark or energy <= 3 or health <= 4):
        return None
    if walled_in or (not dark and not foes and energy < 9):
        return "Sleep" if energy < 9 else "Noop"
    return None if first_nap and health > 4 else _dig_in(world)


def _room(world: World, start: int, closed: int = -1, most: int = 4) -> set[int]:
    """Return up to `most` cells reachable on foot from `start`, with `closed` blocked."""
    room = {start}
    border = [start]
    while border and len(room) < most:
        fresh = _open_sides(world, border.pop()) - room - {closed}
        room |= fresh
        border += fresh
    return room


def _open_sides(world: World, cell: int) -> set[int]:
    """Return the cells beside this one that are walkable, if nothing stands there."""
    beside = (cell + step for step in STEPS.values())
    return {target for target in beside if world.materials[target] in WALKABLE}


def _dig_in(world: World) -> str | None:
    """Dig two cells deep into the rock, turn around and close the entrance with a stone."""
    player = world.player
    if not player.inventory["wood_pickaxe"] or not player.inventory["stone"]:
        return None
    here = cell_of(player)
    ahead = front(world)
    if world.is_free(ahead) and len(_room(world, here, closed=ahead)) <= 3:
        return "Place Stone"
    for move, step in STEPS.items():
        back = here + step
        way_out = here + 2 * step
        leads_out = _open_sides(world, here) == {back} and world.materials[way_out] in WALKABLE
        if leads_out and len(_room(world, back, closed=way_out)) <= 3:
            return move
    deep = (*_AROUND, *(2 * step for step in STEPS.values()))

    def is_deep(cell: int) -> bool:
        return _SOLID.issuperset(world.materials[cell + offset] for offset in deep)

    return reach(world, is_deep, farthest=30)


def _grow(world: World) -> str | None:
    """Search grass for a sapling and plant it, once there are enough stones to fence it in."""
    player = world.player
    if player.achievements["eat_plant"] or _plants(world) or player.inventory["stone"] < 4:
        return None
    action = "Place Plant" if player.inventory["sapling"] else "Do"
    return act_before(world, action, lambda _, ahead: world.materials[ahead] == _GRASS)


def _guard(world: World) -> str | None:
    """Put stones around plants; `_eat` digs one of them out when the plant is ripe."""
    player = world.player
    gaps = set[int]().union(*(_open_sides(world, cell_of(plant)) for plant in _plants(world)))
    if not gaps or player.inventory["stone"] < 1:
        return None
    return act_before(
        world, "Place Stone", lambda stand, ahead: ahead in gaps and stand not in gaps, farthest=18
    )


def _craft(level: str) -> _Goal:
    return lambda world: job.action if (job := find_job(world, level)) else None


@dataclass(frozen=True)
class Job:
    """The next step towards a tool: `lacking` is the material to collect first, `to_build` the
    missing stations."""

    making: Recipe
    action: str
    lacking: str | None
    to_build: Sequence[Recipe]


def find_job(world: World, level: str) -> Job | None:
    """Return the next step for the first missing pickaxe or sword of this level; None if there is
    none."""
    plans = (MAKE[f"Make {level} {tool}"] for tool in ("Pickaxe", "Sword"))
    missing = (making for making in plans if not world.player.inventory[making.name])
    return next((job for making in missing if (job := _work_on(world, making)) is not None), None)


def _work_on(world: World, making: Recipe) -> Job | None:
    """Find the next step towards one tool; None if nothing can be done for it now."""
    player = world.player
    at_hand = world.materials_around(cell_of(player))
    ready = making.nearby <= at_hand
    way = None if ready else _go_beside(world, making.nearby)
    to_build: list[Recipe] = []
    if not (ready or way):
        # The table comes first, since a furnace is built next to one.
        to_build += (
            [] if _TABLE in at_hand or _go_beside(world, _TABLE_ONLY) else [PLACE["Place Table"]]
        )
        to_build += [PLACE["Place Furnace"]] if _FURNACE in making.nearby else []
    needed = Counter(making.uses)
    for placing in to_build:
        needed.update(placing.uses)
    lacking = next(
        (item for item, amount in needed.items() if player.inventory[item] < amount), None
    )
    if lacking is not None:
        action = reach_kind(world, SOURCE[lacking])
    elif ready:
        action = "Make " + making.name.replace("_", " ").title()
    else:
        action = way or _build(world, to_build[0])
    return None if action is None else Job(making, action, lacking, to_build)


def _go_beside(world: World, stations: frozenset[int]) -> str | None:
    return reach(
        world, lambda cell: world.is_free(cell) and stations <= world.materials_around(cell), _NEAR
    )


def _build(world: World, placing: Recipe) -> str | None:
    """Place a table anywhere, a furnace next to a table; dig if there is no free cell."""
    beside = _TABLE_ONLY if placing.name == "furnace" else frozenset()
    action = act_before(
        world,
        f"Place {placing.name.title()}",
        lambda stand, _: beside <= world.materials_around(stand),
    )
    return action or reach_kind(world, SOURCE["stone"])


def _stock(item: str, count: int, achievement: str) -> _Goal:
    """Make the goal to carry `count` of a material that is close by, once `achievement` is
    reached."""
    is_open = lambda player: player.achievements[achievement] and player.inventory[item] < count
    return lambda world: (
        reach_kind(world, SOURCE[item], farthest=12) if is_open(world.player) else None
    )


def _once(achievement: str, item: str, act: _Goal, least: int = 1) -> _Goal:
    """Make the goal to reach an achievement for the first time, with at least so much of an item,
    or of health."""
    is_open = lambda player: (
        not player.achievements[achievement] and player.inventory[item] >= least
    )
    return lambda world: act(world) if is_open(world.player) else None


def _meet(kind: int, achievement: str) -> _Goal:
    """Make the goal to defeat a kind of creature for the first time, while healthy."""
    return _once(achievement, "health", lambda world: reach_kind(world, kind, farthest=60), least=6)


_GOALS: dict[str, _Goal] = {
    "sleep on": lambda world: "Sleep" if world.player.sleeping else None,
    "fight": lambda world: reach(world, lambda cell: world.kinds[cell] in FOES, farthest=1),
    "drink": _drink,
    "eat": _eat,
    "rest": _rest,
    "guard": _guard,
    "cow": _meet(COW, "eat_cow"),
    "Wood": _craft("Wood"),
    "wood": _stock("wood", 6, "make_wood_sword"),
    "Stone": _craft("Stone"),
    "place stone": _once(
        "place_stone", "stone", lambda world: act_before(world, "Place Stone", lambda *_: True)
    ),
    "stone": _stock("stone", 6, "make_stone_sword"),
    "grow": _grow,
    "Iron": _craft("Iron"),
    "diamond": _once(
        "collect_diamond", "iron_pickaxe", lambda world: reach_kind(world, SOURCE["diamond"])
    ),
    "zombie": _meet(ZOMBIE, "defeat_zombie"),
    "skeleton": _meet(SKELETON, "defeat_skeleton"),
}
"""In order of urgency; the first that returns an action decides."""
