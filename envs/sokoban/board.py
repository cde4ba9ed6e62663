"""A room, the moves in it, how it is drawn, and a scripted player. Sets of cells are integers: cell
(x, y) is one bit.

The bit is y * width + x. The outermost cells of a room are walls, so shifting a set of floor cells
by one cell never wraps around an edge. The player is a weighted A* over pushes, without pushes into
cells from which a box cannot reach any target.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from envs.errors import ConfigError

DIRECTIONS: dict[str, tuple[int, int]] = {
    "up": (0, -1),
    "down": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
}
"""(dx, dy) of each move; y grows downwards."""
SYMBOLS = {"ragen": "#_OX√PS", "xsb": "# .$*@+"}
"""Symbols of wall, floor, target, box, box on a target, player and player on a target, in RAGEN and
in level files."""
TILE_PIXELS = 32
_FLOOR = (226, 214, 190)
_WALL = (112, 84, 66)
_TARGET = (200, 60, 60)
_BOX = (190, 130, 60)
_PLACED = (70, 160, 80)
_PLAYER = (60, 90, 200)
_ON_FLOOR = ((), (_TARGET,), (_BOX,), (_PLACED,), (_PLAYER,), (_TARGET, _PLAYER))
_SQUARES = ((_WALL,), *((_FLOOR, *colors) for colors in _ON_FLOOR))
"""Colors of each symbol's squares, from the outermost inwards."""
MAX_NODES = 20_000
"""Nodes that a search expands before it gives up."""
_GUIDANCE = 2
"""Weight of the estimated remaining pushes against those made; above 1 is faster, with longer
plans."""


class State(NamedTuple):
    """What changes during an episode: the player's cell (an index) and the boxes' cells (a set)."""

    player: int
    boxes: int


@dataclass(frozen=True)
class Room:
    """What stays: the size, and the sets of floor cells and of targets (which are floor, too)."""

    width: int
    height: int
    floor: int
    targets: int

    @cached_property
    def strides(self) -> dict[str, int]:
        """Return how far each move shifts a cell's index."""
        return {name: dy * self.width + dx for name, (dx, dy) in DIRECTIONS.items()}

    @cached_property
    def walls(self) -> int:
        return (1 << self.width * self.height) - 1 & ~self.floor

    @cached_property
    def edge(self) -> int:
        """Return the outermost cells."""
        first, *_, last = self.rows
        cells = {*first, *last, *(row[0] for row in self.rows), *(row[-1] for row in self.rows)}
        return sum(1 << cell for cell in cells)

    @cached_property
    def rows(self) -> list[range]:
        """Return the cells of each row."""
        starts = range(0, self.width * self.height, self.width)
        return [range(start, start + self.width) for start in starts]

    def move(self, state: State, direction: str) -> State:
        """Go one step, pushing a box if there is one; the same state if a wall or a second box is
        in the way."""
        stride = self.strides[direction]
        ahead = state.player + stride
        if not self.floor >> ahead & 1:
            return state
        if not state.boxes >> ahead & 1:
            return State(ahead, state.boxes)
        beyond = ahead + stride
        if not (self.floor & ~state.boxes) >> beyond & 1:
            return state
        return State(ahead, state.boxes ^ (1 << ahead) ^ (1 << beyond))

    def reach(self, state: State) -> int:
        """Return the cells that the player can walk to without a push."""
        return self.flood(1 << state.player, self.floor & ~state.boxes)

    def flood(self, cells: int, free: int) -> int:
        """Return all cells of `free` connected to `cells`."""
        width = self.width
        while True:
            wider = (cells | cells << 1 | cells >> 1 | cells << width | cells >> width) & free
            if wider == cells:
                return cells
            cells = wider

    def placed(self, boxes: int) -> int:
        """Return the number of boxes on targets."""
        return (boxes & self.targets).bit_count()

    def look(self, state: State, cell: int) -> int:
        """Return what a cell shows: the place of its symbol in `SYMBOLS`."""
        on_target = self.targets >> cell & 1
        if not self.floor >> cell & 1:
            return 0
        if cell == state.player:
            return 5 + on_target
        return (3 if state.boxes >> cell & 1 else 1) + on_target

    def draw(self, state: State, symbols: str, gap: str = "") -> str:
        """Return the room as text, one line per row; `symbols` are in the order of `SYMBOLS`."""
        lines = []
        for row in self.rows:
            lines.append(gap.join(symbols[self.look(state, cell)] for cell in row))
        return "\n".join(lines)


def shift(cells: int, stride: int) -> int:
    """Return the set moved by `stride` cells."""
    return cells << stride if stride > 0 else cells >> -stride


def each(cells: int) -> Iterator[int]:
    """Yield the indexes of a set's cells, in ascending order."""
    while cells:
        lowest = cells & -cells
        yield lowest.bit_length() - 1
        cells ^= lowest


def read_room(text: str, symbols: str = SYMBOLS["xsb"]) -> tuple[Room, State]:
    """Read a drawn level; cells out of the player's reach are walls. Raises ConfigError for
    impossible levels."""
    rows = [row for row in text.splitlines() if row.strip()]
    width = max(map(len, rows), default=0)
    height = len(rows)
    found = dict.fromkeys(symbols, 0)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            if symbol not in found:
                raise ConfigError(
                    f"a Sokoban level has the symbol {symbol!r}; levels are written with "
                    f"{symbols!r}"
                )
            found[symbol] |= 1 << y * width + x
    _, floor, target, box, placed, player, player_on_target = (found[symbol] for symbol in symbols)
    players = player | player_on_target
    boxes = box | placed
    targets = target | placed | player_on_target
    if players.bit_count() != 1 or not boxes or boxes.bit_count() != targets.bit_count():
        raise ConfigError(
            f"a Sokoban level has {players.bit_count()} players, {boxes.bit_count()} boxes and "
            f"{targets.bit_count()} targets; it needs one player and as many targets as boxes"
        )
    room = Room(width, height, floor | players | boxes | targets, targets)
    inside = room.flood(players, room.floor)
    if inside & room.edge:
        raise ConfigError("a Sokoban level has a gap in its outer wall; close it")
    if (boxes | targets) & ~inside:
        raise ConfigError(
            "a Sokoban level has boxes or targets behind walls, where the player cannot go"
        )
    return Room(width, height, inside, targets), State(players.bit_length() - 1, boxes)


def draw_room(room: Room, state: State) -> np.ndarray:
    """Return a uint8 array (32 * height, 32 * width, 3)."""
    return np.block([[[_tile(room.look(state, cell))] for cell in row] for row in room.rows])


@cache
def _tile(symbol: int) -> np.ndarray:
    """Draw a cell as squares inside each other: floor, then a target, then what stands there."""
    tile = np.empty((TILE_PIXELS, TILE_PIXELS, 3), np.uint8)
    for margin, color in zip((0, 5, 9), _SQUARES[symbol], strict=False):
        inner = slice(margin, TILE_PIXELS - margin)
        tile[inner, inner] = color
    return tile


class Push(NamedTuple):
    """One push: the box's cell before it, and the direction."""

    box: int
    direction: str


@lru_cache(maxsize=256)
def push_distances(room: Room) -> dict[int, int]:
    """Return the pushes that take a lone box from each cell to the nearest target; cells without a
    way are left out."""
    distances = dict.fromkeys(each(room.targets), 0)
    queue = list(distances)
    for cell in queue:
        for stride in room.strides.values():
            before = cell - stride
            player = cell - 2 * stride
            # A floor cell before the wall ring always has a neighbour, so `player` is inside the
            # room.
            if before not in distances and room.floor >> before & 1 and room.floor >> player & 1:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return distances


def is_stuck(room: Room, boxes: int) -> bool:
    """Return whether a box can no longer reach a target, whatever is done; some such cases are not
    found."""
    dead = room.floor & ~sum(1 << cell for cell in push_distances(room))
    return bool(boxes & dead) or _is_blocked(room, boxes)


def _is_blocked(room: Room, boxes: int) -> bool:
    """Return whether four walls and boxes form a square with a box that is not on a target: it can
    never be moved."""
    solid = room.walls | boxes
    width = room.width
    pairs = solid & solid >> 1
    corners = pairs & pairs >> width
    squares = corners | corners << 1
    squares |= squares << width
    return bool(squares & boxes & ~room.targets)


def find_pushes(room: Room, state: State, max_nodes: int = MAX_NODES) -> tuple[Push, ...] | None:
    """Return pushes that solve the room from here, or None if none are found within `max_nodes`
    states."""
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
            rank = made + 1 + _GUIDANCE * ahead
            heapq.heappush(frontier, (rank, next(ticket), made + 1, ahead, after))
    return None


def _pushes(
    room: Room, node: tuple[int, int], distances: dict[int, int]
) -> Iterator[tuple[Push, tuple[int, int]]]:
    """Yield the possible pushes not known to be fatal, with the boxes and the player's cells after
    each."""
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
    for box, direction in pushes:
        behind = box - room.strides[direction]
        moves += [*walk(room, state, behind), direction]
        state = room.move(State(behind, state.boxes), direction)
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
