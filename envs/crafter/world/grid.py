"""The map with its materials, beings and regions, and the base classes of beings.

The map also holds the random generator; all draws of a world form one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from envs.crafter.world.rules import CHUNK, MATERIAL_ID, SIZE, STRIDE, WALKABLE

Direction = tuple[int, int]

_COMPASS: tuple[Direction, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))


_SPANS = [range(first, min(first + CHUNK, SIZE)) for first in range(0, SIZE, CHUNK)]
_CHUNKS = [[x * STRIDE + y for x in xs for y in ys] for xs in _SPANS for ys in _SPANS]
_CHUNK_NUMBER = {cell: number for number, cells in enumerate(_CHUNKS) for cell in cells}
_KINDS = len(MATERIAL_ID) + 1
_CHUNK_OFFSETS = _KINDS * np.array([_CHUNK_NUMBER[x * STRIDE + y] for x in range(SIZE) for y in range(SIZE)])


class Chunk:
    """A region of the map; `beings` keeps the order of arrival, on which later draws depend."""

    __slots__ = ("beings", "cells", "counts")

    def __init__(self, cells: list[int], counts: list[int]) -> None:
        self.cells = cells
        self.beings: dict[Being, None] = {}
        self.counts = counts
        """Cells of each material."""


class Grid:
    """The map of one world, and its random generator.

    `materials`, `kinds` and `beings_at` are flat arrays, cell = x * STRIDE + y. `kinds` holds the being on a cell, else
    the material. Outside of the world they hold 0 or None. `settled` holds the regions that any being ever entered.
    """

    def __init__(self, land: np.ndarray, random: np.random.RandomState, draw_word: Callable[[], int]) -> None:
        self.random = random
        self.uniform: Callable[[], float] = random.random_sample
        self.draw_word = draw_word
        padded = np.zeros((STRIDE, STRIDE), np.uint8)
        padded[:SIZE, :SIZE] = land.reshape(SIZE, SIZE)
        self.materials = bytearray(padded.tobytes())
        self.kinds = bytearray(self.materials)
        self.beings: dict[Being, None] = {}
        self.beings_at: list[Being | None] = [None] * (STRIDE * STRIDE)
        self.settled: dict[Chunk, None] = {}
        counts = np.bincount(_CHUNK_OFFSETS + land, minlength=len(_CHUNKS) * _KINDS).reshape(-1, _KINDS)
        self._chunks = [Chunk(*chunk) for chunk in zip(_CHUNKS, counts.tolist(), strict=True)]

    def _chunk_of(self, cell: int) -> Chunk:
        return self._chunks[_CHUNK_NUMBER[cell]]

    def is_free(self, cell: int, materials: frozenset[int]) -> bool:
        return self.beings_at[cell] is None and self.materials[cell] in materials

    def materials_around(self, x: int, y: int) -> set[int]:
        """Return the materials of the 3 x 3 cells around; none in the first row and column, as in the original."""
        if x == 0 or y == 0:
            return set()
        first = (x - 1) * STRIDE + y - 1
        return {material for row in range(3) for material in self.materials[first + row * STRIDE :][:3]}

    def set_material(self, cell: int, material: int) -> None:
        counts = self._chunk_of(cell).counts
        counts[self.materials[cell]] -= 1
        counts[material] += 1
        self.materials[cell] = material
        if self.beings_at[cell] is None:
            self.kinds[cell] = material

    def add(self, being: Being) -> None:
        chunk = self._chunk_of(being.cell)
        self.settled[chunk] = chunk.beings[being] = self.beings[being] = None
        self.beings_at[being.cell] = being
        self.kinds[being.cell] = being.kind

    def remove(self, being: Being) -> None:
        if being.removed:
            return
        being.removed = True
        self._leave(being.cell)
        del self.beings[being]
        del self._chunk_of(being.cell).beings[being]

    def move(self, being: Being, direction: Direction, target: int) -> None:
        """Move a being, not removed, to the free cell `target`, one step in `direction`."""
        self._leave(being.cell)
        old, new = self._chunk_of(being.cell), self._chunk_of(target)
        if old is not new:
            del old.beings[being]
            self.settled[new] = new.beings[being] = None
        being.x, being.y, being.cell = being.x + direction[0], being.y + direction[1], target
        self.beings_at[target] = being
        self.kinds[target] = being.kind

    def _leave(self, cell: int) -> None:
        self.beings_at[cell] = None
        self.kinds[cell] = self.materials[cell]


class Being:
    """Something on a cell. A being removed in this step still takes its turn, as in the original."""

    __slots__ = ("cell", "removed", "world", "x", "y")
    kind: ClassVar[int]
    walkable: ClassVar[frozenset[int]] = WALKABLE

    def __init__(self, world: Grid, x: int, y: int) -> None:
        self.world, self.x, self.y, self.cell = world, x, y, x * STRIDE + y
        self.removed = False

    def update(self) -> None:
        """Take one turn."""
        raise NotImplementedError

    def hurt(self, damage: int) -> None:
        """Take damage."""
        raise NotImplementedError

    def move(self, direction: Direction) -> bool:
        """Move one step if the target cell is free; return whether it was."""
        target = self.cell + direction[0] * STRIDE + direction[1]
        if not self.world.is_free(target, self.walkable):
            return False
        if not self.removed:
            self.world.move(self, direction, target)
        return True

    def distance(self, x: int, y: int) -> int:
        return abs(x - self.x) + abs(y - self.y)

    def toward(self, other: Being, long_axis: bool = True) -> Direction:
        """Return the step towards another being along the longer axis of the distance, or along the shorter one."""
        dx, dy = other.x - self.x, other.y - self.y
        if (abs(dx) > abs(dy)) if long_axis else (abs(dx) <= abs(dy)):
            return (dx > 0) - (dx < 0), 0
        return 0, (dy > 0) - (dy < 0)

    def move_randomly(self) -> None:
        self.move(_COMPASS[self.world.draw_word() & 3])


class Creature(Being):
    """A being with its own health; this includes plants and arrows."""

    __slots__ = ("health",)
    full_health: ClassVar[int]

    def __init__(self, world: Grid, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.health = self.full_health

    def hurt(self, damage: int) -> None:
        self.health = max(0, self.health - damage)
