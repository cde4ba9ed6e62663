"""Draws the picture that BALROG shows with its text, using the views and textures of the `crafter` package."""

from __future__ import annotations

from functools import cache

import numpy as np
from crafter import constants, engine

from envs.crafter_world.creatures import Arrow
from envs.crafter_world.grid import Being
from envs.crafter_world.plant import Plant
from envs.crafter_world.player import Player
from envs.crafter_world.rules import KIND_NAMES, SIZE, STRIDE
from envs.crafter_world.world import NOISE_SHAPE, World

PIXELS = 256
_CELLS = 9
_ITEM_ROWS = 2
_UNIT = np.array([PIXELS // _CELLS] * 2)
_SIDES = {(-1, 0): "left", (1, 0): "right", (0, -1): "up", (0, 1): "down"}


@cache
def _load_textures() -> engine.Textures:
    return engine.Textures(constants.root / "assets")


def draw(world: World) -> np.ndarray:
    """Return BALROG's picture as a uint8 array (256, 256, 3), including its noise at night.

    Raises:
        RuntimeError: it is night, and the world was made without `pictures`.
    """
    textures = _load_textures()
    local = engine.LocalView(_Scene(world), textures, [_CELLS, _CELLS - _ITEM_ROWS])
    items = engine.ItemView(textures, [_CELLS, _ITEM_ROWS])
    view = np.concatenate([local(_Drawn(world.player), _UNIT), items(world.player.inventory, _UNIT)], 1)
    canvas = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    border = (PIXELS - _CELLS * _UNIT[0]) // 2
    canvas[border : border + view.shape[0], border : border + view.shape[1]] = view
    return canvas.transpose((1, 0, 2))


def draw_clear(world: World) -> np.ndarray:
    """Return the same view for people as a uint8 array (252, 252, 3): 9 x 9 cells of 28 pixels, without noise.

    Darkness comes in eighths, so cells repeat between frames and an animation stays small.
    """
    textures = _load_textures()
    scene = _Scene(world)
    scene.daylight = round(8 * world.daylight) / 8
    local = _ClearView(scene, textures, [_CELLS, _CELLS - _ITEM_ROWS])
    items = engine.ItemView(textures, [_CELLS, _ITEM_ROWS])
    view = np.concatenate([local(_Drawn(world.player), _UNIT), items(world.player.inventory, _UNIT)], 1)
    return view.astype(np.uint8).transpose((1, 0, 2))


class _ClearView(engine.LocalView):
    def _noise(self, canvas: np.ndarray, amount: float, stddev: float) -> np.ndarray:
        return canvas


class _Scene:
    """A world in the form that crafter's views read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.area = (SIZE, SIZE)
        self.daylight = world.daylight
        self.random = self
        self.objects = [_Drawn(being) for being in world.beings]

    def __getitem__(self, position: np.ndarray) -> tuple[str, None]:
        x, y = position.tolist()
        return KIND_NAMES[self._world.materials[x * STRIDE + y]], None

    def uniform(self, low: float, high: float, shape: tuple[int, int]) -> np.ndarray:
        """Return the noise already drawn by the world for this step."""
        if tuple(shape) != NOISE_SHAPE or self._world.noise is None:
            raise RuntimeError(f"no noise of shape {tuple(shape)} was kept; make the world with pictures=True")
        return low + (high - low) * self._world.noise


class _Drawn:
    """A being in the form that crafter's views read."""

    def __init__(self, being: Being) -> None:
        self.pos = np.array([being.x, being.y])
        self.sleeping = isinstance(being, Player) and being.sleeping
        self.texture = _name_texture(being)


def _name_texture(being: Being) -> str:
    if isinstance(being, Player):
        return "player-sleep" if being.sleeping else f"player-{_SIDES[being.facing]}"
    if isinstance(being, Arrow):
        return f"arrow-{_SIDES[being.facing]}"
    return "plant-ripe" if isinstance(being, Plant) and being.ripe else KIND_NAMES[being.kind]
