"""Describes a MiniGrid agent's view in BALROG's words, directly from the grid.

The view is a square of `size` x `size` cells with the agent in the middle of its lowest row, looking up; cell (i, j)
is column i, row j. The text equals that of the text fork of Minigrid (BartekCupial/Minigrid, `gen_graph`) without
"You see ", and the visible cells are those of Minigrid's `Grid.process_vis`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any


def describe_view(game: Any) -> str:
    """Return BALROG's description of what the agent of this MiniGrid game sees now, one fact per line."""
    size = game.agent_view_size
    x, y = game.agent_pos
    window = _window(game.grid.width, game.grid.height, int(x), int(y), int(game.agent_dir), size)
    lines = [] if game.carrying is None else [f"You carry a {game.carrying.color} {game.carrying.type}"]
    return "\n".join([*lines, *_describe_cells(window(game.grid.grid), size)])


def _describe_cells(cells: Sequence[Any], size: int) -> Iterator[str]:
    """Yield the nearest visible walls in front, left and right, then the visible objects in scan order."""
    opaque = [0] * size
    things = []
    for index, cell in enumerate(cells):
        if cell is None:
            continue
        if cell.type == "wall":
            opaque[index % size] |= 1 << index // size
            continue
        things.append((index, cell))
        if not cell.see_behind():
            opaque[index % size] |= 1 << index // size
    seen, light = [0] * size, 1 << size // 2
    for j in range(size - 1, -1, -1):
        seen[j], light = _spread_light(light, opaque[j], size)
    for line_of_sight in _lines_of_sight(size):
        for index, text in line_of_sight:
            cell = cells[index]
            if cell is not None and seen[index % size] >> index // size & 1:
                if cell.type == "wall":
                    yield text
                break
    places = _places(size)
    for index, cell in things:
        # The agent's own cell has no place; an open door that it stands in is not described.
        if seen[index % size] >> index // size & 1 and places[index]:
            yield f"{_name(cell)} {places[index]}"


def _name(cell: Any) -> str:
    if cell.type != "door":
        return f"a {cell.color} {cell.type}"
    # "a open" as in the recordings of the text fork.
    state = "open" if cell.is_open else "locked" if cell.is_locked else "closed"
    return f"a {state} {cell.color} door"


@functools.cache
def _spread_light(lit: int, opaque: int, size: int) -> tuple[int, int]:
    """Spread light in a row and ahead as `Grid.process_vis`, in two passes; all are bit masks of columns."""
    ahead = 0
    for i in range(size - 1):
        if lit >> i & 1 and not opaque >> i & 1:
            lit |= 2 << i
            ahead |= 3 << i
    for i in range(size - 1, 0, -1):
        if lit >> i & 1 and not opaque >> i & 1:
            lit |= 1 << i - 1
            ahead |= 3 << i - 1
    return lit, ahead


@functools.lru_cache(maxsize=1 << 14)
def _window(width: int, height: int, x: int, y: int, direction: int, size: int) -> Callable[[Sequence], tuple]:
    """Return a function that picks the cells of the view, index i * size + j, from the grid's row-major list."""
    forward_x, forward_y = ((1, 0), (0, 1), (-1, 0), (0, -1))[direction]
    right_x, right_y = -forward_y, forward_x
    indices = []
    for i in range(size):
        for j in range(size):
            ahead, aside = size - 1 - j, i - size // 2
            cell_x, cell_y = x + forward_x * ahead + right_x * aside, y + forward_y * ahead + right_y * aside
            inside = 0 <= cell_x < width and 0 <= cell_y < height
            # Cells outside the grid count as wall: its last cell, -1, is a corner of the outer wall.
            indices.append(cell_y * width + cell_x if inside else -1)
    return itemgetter(*indices)


@functools.cache
def _lines_of_sight(size: int) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return the cells in front, left and right, nearest first, each with the text for a wall there."""
    middle, last = size // 2, size - 1
    front = ((middle * size + last - n, f"a wall {_steps(n, 'forward')}") for n in range(1, size))
    left = (((middle - n) * size + last, f"a wall {_steps(n, 'left')}") for n in range(1, middle + 1))
    right = (((middle + n) * size + last, f"a wall {_steps(n, 'right')}") for n in range(1, middle + 1))
    return tuple(front), tuple(left), tuple(right)


@functools.cache
def _places(size: int) -> tuple[str, ...]:
    """Return the position of each cell of the view in words; empty for the agent's own."""
    places = []
    for i in range(size):
        for j in range(size):
            aside, ahead = i - size // 2, size - 1 - j
            parts = [_steps(abs(aside), "right" if aside > 0 else "left")] if aside else []
            parts += [_steps(ahead, "forward")] if ahead else []
            places.append(" and ".join(parts))
    return tuple(places)


def _steps(count: int, direction: str) -> str:
    return f"{count} step{'s' if count > 1 else ''} {direction}"
