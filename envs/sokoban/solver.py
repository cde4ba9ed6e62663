"""A scripted player: weighted A* over pushes, without pushes into cells from which a box cannot reach any target."""

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from envs.sokoban.board import DIRECTIONS, Room, State, each, shift

MAX_NODES = 20_000
"""Nodes that a search expands before it gives up."""

_GUIDANCE = 2
"""Weight of the estimated remaining pushes against those made; above 1 is faster, with longer plans."""


class Push(NamedTuple):
    """One push: the box's cell before it, and the direction."""

    box: int
    direction: str


@lru_cache(maxsize=256)
def push_distances(room: Room) -> dict[int, int]:
    """Return the pushes that take a lone box from each cell to the nearest target; cells without a way are left out."""
    distances = dict.fromkeys(each(room.targets), 0)
    queue = list(distances)
    for cell in queue:
        for stride in room.strides.values():
            before, player = cell - stride, cell - 2 * stride
            # A floor cell before the wall ring always has a neighbour, so `player` is inside the room.
            if before not in distances and room.floor >> before & 1 and room.floor >> player & 1:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return distances


def is_stuck(room: Room, boxes: int) -> bool:
    """Return whether a box can no longer reach a target, whatever is done; some such cases are not found."""
    dead = room.floor & ~sum(1 << cell for cell in push_distances(room))
    return bool(boxes & dead) or _is_blocked(room, boxes)


def _is_blocked(room: Room, boxes: int) -> bool:
    """Return whether four walls and boxes form a square with a box that is not on a target: it can never be moved."""
    solid, width = room.walls | boxes, room.width
    corners = solid & solid >> 1 & solid >> width & solid >> width + 1
    return bool((corners | corners << 1 | corners << width | corners << width + 1) & boxes & ~room.targets)


def find_pushes(room: Room, state: State, max_nodes: int = MAX_NODES) -> tuple[Push, ...] | None:
    """Return pushes that solve the room from here, or None if none are found within `max_nodes` states."""
    if is_stuck(room, state.boxes):
        return None
    distances = push_distances(room)
    start = (state.boxes, room.reach(state))
    left = sum(distances[cell] for cell in each(state.boxes))
    came: dict[tuple[int, int], tuple[tuple[int, int], Push] | None] = {start: None}
    ticket = count()
    frontier = [(_GUIDANCE * left, next(ticket), 0, left, start)]
    for _ in range(max_nodes):
        if not frontier:
            return None
        _, _, made, left, node = heapq.heappop(frontier)
        if not left:
            pushes: list[Push] = []
            while (step := came[node]) is not None:
                node, push = step
                pushes.append(push)
            return tuple(reversed(pushes))
        for push, after in _pushes(room, node, distances):
            if after in came:
                continue
            came[after] = node, push
            ahead = left - distances[push.box] + distances[push.box + room.strides[push.direction]]
            heapq.heappush(frontier, (made + 1 + _GUIDANCE * ahead, next(ticket), made + 1, ahead, after))
    return None


def _pushes(room: Room, node: tuple[int, int], distances: dict[int, int]) -> Iterator[tuple[Push, tuple[int, int]]]:
    """Yield the possible pushes not known to be fatal, with the boxes and the player's cells after each."""
    boxes, region = node
    free = room.floor & ~boxes
    for direction, stride in room.strides.items():
        for cell in each(boxes & shift(region, stride) & shift(free, -stride)):
            target = cell + stride
            after = boxes ^ (1 << cell) ^ (1 << target)
            if target in distances and not _is_blocked(room, after):
                yield Push(cell, direction), (after, room.flood(1 << cell, room.floor & ~after))


def moves_of(room: Room, state: State, pushes: Sequence[Push]) -> list[str]:
    """Return the player's moves that make the pushes, with the shortest walks between them."""
    moves: list[str] = []
    for push in pushes:
        moves += [*walk(room, state, push.box - room.strides[push.direction]), push.direction]
        state = room.move(State(push.box - room.strides[push.direction], state.boxes), push.direction)
    return moves


def walk(room: Room, state: State, goal: int) -> list[str]:
    """Return the shortest way to a cell without a push; raises ValueError if there is none."""
    free = room.floor & ~state.boxes
    paths: dict[int, list[str]] = {state.player: []}
    queue = [state.player]
    for cell in queue:
        if cell == goal:
            return paths[cell]
        for direction in DIRECTIONS:
            ahead = cell + room.strides[direction]
            if ahead not in paths and free >> ahead & 1:
                paths[ahead] = [*paths[cell], direction]
                queue.append(ahead)
    raise ValueError(f"cell {goal} cannot be reached from cell {state.player} without a push")
