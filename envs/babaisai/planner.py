"""A scripted player: best-first search over pushes, for demonstrations and to check that levels can be won.

A node is a world right after a push. Walking without a push does not change the world, so only pushes branch. Worlds
with several YOU things or with `noun is noun` rules are not searched.
"""

import heapq
from collections.abc import Iterator
from itertools import count

from envs.babaisai.world import DIRECTIONS, Cell, World

Plan = list[str]

_GUIDANCE = 3
"""Weight of the estimated remaining distance against the steps made; above 1 is faster, with longer plans."""
_FAR = 30
"""Distance assumed if no block could complete a win rule."""
_LOCKED = 6
"""Extra distance while something is STOP."""


def find_plan(world: World, max_nodes: int = 4000) -> Plan | None:
    """Return moves that win from here; None if `max_nodes` expanded nodes do not lead to a win."""
    start = _locate_you(world)
    if start is None:
        return None
    ticket = count()
    frontier = [(0, next(ticket), 0, world, start, [])]
    seen: set[tuple[tuple[Cell, ...], int]] = set()
    for _ in range(max_nodes):
        if not frontier:
            return None
        _, _, cost, world, start, plan = heapq.heappop(frontier)
        paths, goal = _walk(world, start)
        if goal is not None:
            return plan + goal
        floor = _without(world, start)
        key = (tuple(floor.cells), min(paths))
        if key in seen:
            continue
        seen.add(key)
        for moves, after, place, won in _pushes(world, start, paths):
            if won:
                return plan + moves
            if place is not None:
                spent = cost + len(moves)
                rank = spent + _GUIDANCE * _distance(after)
                heapq.heappush(frontier, (rank, next(ticket), spent, after, place, plan + moves))
    return None


def _locate_you(world: World) -> int | None:
    """Return the index of the only visible YOU thing; None unless there is one, and no thing turns into another."""
    if world.rules.swaps:
        return None
    tops = ((index, world.cells[index][-1]) for index, _, _ in world.interior if world.cells[index])
    places = [index for index, top in tops if top.kind == "thing" and top.name in world.rules.you]
    return places[0] if len(places) == 1 else None


def _without(world: World, place: int) -> World:
    floor = world.copy()
    floor.cells[place] = floor.cells[place][:-1]
    return floor


def _walk(world: World, start: int) -> tuple[dict[int, Plan], Plan | None]:
    """Return shortest paths to all cells reachable without a push, and the path to a win if there is one."""
    rules, cells = world.rules, world.cells
    paths: dict[int, Plan] = {start: []}
    queue = [start]
    for place in queue:
        for direction, (dx, dy) in DIRECTIONS.items():
            ahead = place + dy * world.width + dx
            top = cells[ahead][-1] if cells[ahead] else None
            if ahead in paths or (top and (rules.moves_when_pushed(top) or not rules.lets_in(top))):
                continue
            if top and top.name in rules.win:
                return paths, [*paths[place], direction]
            if top is None or top.name not in rules.lose:
                paths[ahead] = [*paths[place], direction]
                queue.append(ahead)
    return paths, None


def _pushes(world: World, start: int, paths: dict[int, Plan]) -> Iterator[tuple[Plan, World, int | None, bool]]:
    """Yield all possible pushes: (moves, world afterwards, index of YOU or None if the search ends there, won)."""
    you = world.cells[start][-1]
    floor = _without(world, start)
    for place, path in paths.items():
        before = floor.copy()
        before.cells[place] += (you,)
        for direction, (dx, dy) in DIRECTIONS.items():
            ahead = before.cells[place + dy * world.width + dx]
            if not ahead or not world.rules.moves_when_pushed(ahead[-1]):
                continue
            after = before.copy()
            outcome = after.step(direction)
            if after.cells == before.cells and not outcome.won:
                continue
            where = None if outcome.lost else _locate_you(after)
            yield [*path, direction], after, where, outcome.won


def _distance(world: World) -> int:
    """Estimate the pushes needed until something reachable is WIN; may overestimate."""
    locked = _LOCKED if world.rules.stop else 0
    tops = [(world.cells[index][-1], x, y) for index, x, y in world.interior if world.cells[index]]
    present = {piece.name for piece, _, _ in tops if piece.kind == "thing" and piece.name not in world.rules.you}
    if present & world.rules.win:
        return locked
    nouns = [(x, y) for piece, x, y in tops if piece.kind == "noun" and piece.name in present]
    slots = []  # where a noun would complete `noun is win`
    for piece, x, y in tops:
        for dx, dy in ((1, 0), (0, 1)) if piece.kind == "property" and piece.name == "win" else ():
            link = world.top(x - dx, y - dy)
            if link is not None and link.kind == "is" and x - 2 * dx > 0 and y - 2 * dy > 0:
                slots.append((x - 2 * dx, y - 2 * dy))
    gaps = [abs(x - slot_x) + abs(y - slot_y) for slot_x, slot_y in slots for x, y in nouns]
    return min(gaps, default=_FAR) + locked
