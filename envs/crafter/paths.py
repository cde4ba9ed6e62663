"""Path search for the scripted player: the first move of the cheapest path, through rock and over water."""

import heapq
from collections.abc import Callable

from envs.crafter.world.player import Player
from envs.crafter.world.rules import COLLECT, COW, MATERIAL_ID, MOVES, PLANT, SKELETON, STRIDE, WALKABLE, ZOMBIE
from envs.crafter.world.world import World

STEPS = {action: dx * STRIDE + dy for action, (dx, dy) in MOVES.items()}
"""Offset of each move in the flat arrays."""
FOES = (ZOMBIE, SKELETON)
_WATER = MATERIAL_ID["water"]
_DIG, _BRIDGE, _BEING, _FENCE = 2, 4, 4, 20


def front(player: Player) -> int:
    """Return the cell that the player faces."""
    return player.cell + player.facing[0] * STRIDE + player.facing[1]


def find_way(world: World, is_goal: Callable[[int], bool], farthest: int = 200) -> tuple[str, int] | None:
    """Return first move and cost of the cheapest way to a goal cell, walked, dug or bridged; None without one."""
    items = world.player.inventory
    entry_of = {COW: _BEING, ZOMBIE: _BEING, SKELETON: _BEING}  # steps to enter a cell of each kind; others are closed
    for material, rule in COLLECT.items():
        if rule.leaves in WALKABLE and all(items[name] >= amount for name, amount in rule.needs):
            entry_of[material] = _DIG
    if items["wood_pickaxe"] and items["stone"]:
        entry_of[_WATER] = _BRIDGE
    entry_of |= dict.fromkeys(WALKABLE, 1)
    fences = {being.cell + step for being in world.beings if being.kind == PLANT for step in STEPS.values()}
    start, kinds = world.player.cell, world.kinds
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
    """Return the next action on the path to a goal cell, `Do` once it is in front; None if there is no path."""
    way = find_way(world, is_goal, farthest)
    if way is None:
        return None
    target = world.player.cell + STEPS[way[0]]
    if world.is_free(target, WALKABLE) or front(world.player) != target:
        return way[0]
    return "Place Stone" if world.kinds[target] == _WATER and not is_goal(target) else "Do"


def reach_kind(world: World, *kinds: int, farthest: int = 200) -> str | None:
    """Return the next action to reach and use the nearest material or being of these kinds."""
    if not any(kind in world.kinds for kind in kinds):
        return None
    return reach(world, lambda cell: world.kinds[cell] in kinds, farthest)


def act_before(world: World, action: str, is_wanted: Callable[[int, int], bool], farthest: int = 200) -> str | None:
    """Return `action` in front of a wanted free cell, else the next move towards one; None if there is no path.

    The player faces a free cell only after walking towards it, so the path ends with a straight step.
    `is_wanted(stand, ahead)` selects the pairs of cells.
    """
    player = world.player

    def fits(stand: int, ahead: int) -> bool:
        return world.is_free(ahead, WALKABLE) and is_wanted(stand, ahead)

    def last_move(start: int) -> str | None:
        moves = (m for m, s in STEPS.items() if world.is_free(start + s, WALKABLE) and fits(start + s, start + 2 * s))
        return next(moves, None)

    if fits(player.cell, front(player)):
        return action
    move = last_move(player.cell)
    return move or reach(world, lambda cell: world.is_free(cell, WALKABLE) and last_move(cell) is not None, farthest)
