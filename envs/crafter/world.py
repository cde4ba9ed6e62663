"""The `crafter` package's game as BALROG plays it: two images per step, and episodes that a seed
determines.

Crafter keeps the creatures of each region in a set and chooses from it, so its order would depend
on memory addresses. Here they keep their order of arrival.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from crafter import engine
from crafter.env import Env
from opensimplex import internals
from PIL import Image

from envs.crafter.rules import ACTION_NAMES, WALKABLE

LENGTH = 10_000
"""Steps after which Crafter itself ends an episode."""
STRIDE = 72
"""Cells from one column to the next in flat arrays; the margin stays 0, which means outside of the
world."""
_CELLS = (9, 7)
_PIXELS = (256, 256)
_CLEAR_PIXELS = (252, 252)
_NOISE_SHAPE = (252, 196)
"""Random numbers per image at night: BALROG's 256 x 256 pixels without border and inventory."""

if not hasattr(internals._noise3, "py_func"):  # without numba
    # Same numbers, but a list unpacks faster than an array: worlds are made three times as fast.
    internals.GRADIENTS3 = internals.GRADIENTS3.tolist()


class _OrderedSet(dict[Any, None]):
    """A set that is iterated in the order of arrival."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class _OrderedWorld(engine.World):
    def reset(self, seed: int | None = None) -> None:
        super().reset(seed)
        self._chunks: Any = defaultdict(_OrderedSet)


class _EvenView(engine.LocalView):
    """Crafter's view of the surroundings without the noise of the night."""

    def _noise(self, canvas: np.ndarray, amount: float, stddev: float) -> np.ndarray:
        return canvas


class World(Env):
    """One episode. With `images`, `image` is BALROG's, RGB, 256 x 256 pixels.

    `kinds` and `materials` are flat, cell = x * STRIDE + y. `kinds` holds the being on a cell, else
    the material.
    """

    def __init__(self, seed: int, images: bool = False) -> None:
        super().__init__(size=_PIXELS, length=LENGTH, seed=seed)
        self._world.__class__ = _OrderedWorld
        self._even_view = _EvenView(self._world, self._textures, _CELLS)
        self._images = images
        self.image: Image.Image | None = None
        self.reset()
        self._look(self._sem_view())

    def play(self, action: str) -> float:
        """Advance one step; return Crafter's reward: 1 for any new achievement, 0.1 per point of
        health."""
        _, reward, _, info = self.step(ACTION_NAMES.index(action))
        self._look(info["semantic"])
        if self._images:
            self.image = Image.fromarray(self.render())
        else:
            self._obs()
        return float(reward)

    def _obs(self) -> Any:
        """Draw the random numbers of an image, as Crafter and BALROG do once per step each, but not
        the image."""
        if self.daylight < 0.5:
            self._world.random.uniform(size=_NOISE_SHAPE)

    def render_clear(self) -> np.ndarray:
        """Return the view for people, uint8 (252, 252, 3), without noise; darkness in eighths keeps
        films small."""
        daylight = self.daylight
        noisy_view = self._local_view
        self._world.daylight = round(8 * daylight) / 8
        self._local_view = self._even_view
        try:
            return self.render(_CLEAR_PIXELS)
        finally:
            self._world.daylight = daylight
            self._local_view = noisy_view

    def _look(self, kinds: np.ndarray) -> None:
        self.kinds, self.materials = _flatten(kinds), _flatten(self._world._mat_map)

    @property
    def player(self) -> Any:
        """Crafter's player, with `inventory`, `achievements`, `facing`, `sleeping` and `health`."""
        return self._player

    @property
    def beings(self) -> list[Any]:
        """All of Crafter's objects, in order of arrival."""
        return self._world.objects

    @property
    def unlocked(self) -> frozenset[str]:
        return frozenset(self._unlocked or ())

    @property
    def daylight(self) -> float:
        """Brightness, 0 to 1; a day has 300 steps."""
        return self._world.daylight

    @property
    def steps(self) -> int:
        return self._step or 0

    def is_free(self, cell: int) -> bool:
        """Return whether the player could walk onto the cell."""
        return self.kinds[cell] in WALKABLE

    def materials_around(self, cell: int) -> set[int]:
        """Return the materials of the 3 x 3 cells around; none in the first row and column, as in
        Crafter."""
        if min(divmod(cell, STRIDE)) == 0:
            return set()
        return {
            material
            for x in (-STRIDE, 0, STRIDE)
            for material in self.materials[cell + x - 1 : cell + x + 2]
        }


def _flatten(cells: np.ndarray) -> bytes:
    flat = np.zeros((STRIDE, STRIDE), np.uint8)
    flat[: cells.shape[0], : cells.shape[1]] = cells
    return flat.tobytes()


def cell_of(being: Any) -> int:
    """Return the cell of one of Crafter's objects in the flat arrays."""
    x, y = being.pos.tolist()
    return x * STRIDE + y
