"""Draws the image that BALROG shows with its text, bit for bit equal to the views of the `crafter` package.

Crafter itself draws every figure on every ground, once per process. An image puts these tiles side by side as indexes
into one palette, so that light is computed per color instead of per pixel. Only night noise is computed per pixel.
Arrays are x-major as in crafter, and transposed at the end.
"""

from functools import cache, lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from crafter import constants, engine
from PIL import Image

from envs.crafter.world.player import Plant, Player
from envs.crafter.world.rules import KIND_NAMES, MATERIAL_ID, PLAYER, STRIDE
from envs.crafter.world.world import NOISE_SHAPE, Arrow, World

PIXELS = 256
_CELLS = 9
_ROWS = 7
_SIDE = PIXELS // _CELLS
_UNIT = np.array([_SIDE, _SIDE])
_SIDES = {(-1, 0): "left", (1, 0): "right", (0, -1): "up", (0, 1): "down"}
_TURNING = [f"{name}-{side}" for name in ("player", "arrow") for side in _SIDES.values()]
_FIGURES = ("", "player-sleep", *_TURNING, "cow", "zombie", "skeleton", "plant", "plant-ripe")
_FIGURE_NUMBER = {name: number for number, name in enumerate(_FIGURES)}
_OUTSIDE = 127
"""The gray of cells outside of the world."""
_NIGHT_TINT = (0, 16, 64)
_COLUMNS_AT_ONCE = 3
"""Columns of cells that are computed together at night; their arrays fit into the processor's cache."""


class _Tiles(NamedTuple):
    """All tiles, material * len(_FIGURES) + figure."""

    palette: np.ndarray
    """All colors, uint8 (colors, 3)."""
    numbers: np.ndarray
    """The palette's number of each pixel, int64 (tiles, x, y)."""
    channels: np.ndarray
    """The same pixels as red, green and blue, uint8 (3, tiles, x, y)."""


class _EvenLight(engine.LocalView):
    def _noise(self, canvas: np.ndarray, amount: float, stddev: float) -> np.ndarray:
        return canvas


_light = _EvenLight(SimpleNamespace(area=()), None, ())


@cache
def _load_textures() -> engine.Textures:
    return engine.Textures(constants.root / "assets")


@cache
def _draw_tiles() -> _Tiles:
    textures, corner = _load_textures(), (0, 0)
    canvas = np.full((len(MATERIAL_ID) + 1, len(_FIGURES), _SIDE, _SIDE, 3), _OUTSIDE, np.uint8)
    for material, row in zip(MATERIAL_ID, canvas[1:], strict=True):
        for figure, tile in zip(_FIGURES, row, strict=True):
            engine._draw(tile, corner, textures.get(material, _UNIT))
            if figure:
                engine._draw_alpha(tile, corner, textures.get(figure, _UNIT))
    pixels = canvas.reshape(-1, _SIDE, _SIDE, 3)
    palette, numbers = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    return _Tiles(palette, numbers.reshape(pixels.shape[:-1]), np.ascontiguousarray(np.moveaxis(pixels, -1, 0)))


@cache
def _draw_item(name: str, amount: int) -> np.ndarray:
    return _pack(engine.ItemView(_load_textures(), [1, 1])({name: amount}, _UNIT))


def _pack(colors: np.ndarray) -> np.ndarray:
    """Cut colors (..., 3) to bytes and pack each into one uint32 (...)."""
    packed = np.zeros((*colors.shape[:-1], 4), np.uint8)
    packed[..., :3] = colors
    return packed.view(np.uint32)[..., 0]


def draw(world: World) -> Image.Image:
    """Return BALROG's image, RGB, 256 x 256 pixels; raises RuntimeError at night in a world without `images`."""
    if world.daylight >= 0.5:
        return _lay_out(world, _draw_even(world, world.daylight), PIXELS)
    scene = _draw_night(world)
    if world.player.sleeping:
        scene = _asleep().take(np.asarray(_to_image(scene).convert("L")).astype(np.intp))
    return _lay_out(world, scene, PIXELS)


def draw_clear(world: World) -> np.ndarray:
    """Return the view for people, uint8 (252, 252, 3), without noise; darkness in eighths keeps films small."""
    return np.array(_lay_out(world, _draw_even(world, round(8 * world.daylight) / 8), _CELLS * _SIDE))


def _lay_out(world: World, scene: np.ndarray, pixels: int) -> Image.Image:
    """Put the packed surroundings (252, 196) and the inventory below them into the middle of a square image."""
    canvas = np.zeros((pixels, pixels), np.uint32)
    border = (pixels - _CELLS * _SIDE) // 2
    width, height = scene.shape
    canvas[border : border + width, border : border + height] = scene
    for place, (name, amount) in enumerate(world.player.inventory.items()):
        if amount > 0:
            row, column = divmod(place, _CELLS)
            x, y = border + column * _SIDE, border + (_ROWS + row) * _SIDE
            canvas[x : x + _SIDE, y : y + _SIDE] = _draw_item(name, amount)
    return _to_image(canvas).transpose(Image.Transpose.TRANSPOSE)


def _to_image(packed: np.ndarray) -> Image.Image:
    height, width = packed.shape
    return Image.frombytes("RGB", (width, height), packed.data, "raw", "RGBX", 0, 1)


def _look(world: World) -> np.ndarray:
    """Return the numbers of the visible tiles, (9, 7)."""
    figures = np.zeros((_CELLS, _ROWS), np.intp)
    west, north = world.player.x - _CELLS // 2, world.player.y - _ROWS // 2
    for column, row in np.argwhere(_crop(world, world.kinds) >= PLAYER).tolist():
        being = world.beings_at[(west + column) * STRIDE + north + row]
        assert being is not None
        name = "plant-ripe" if isinstance(being, Plant) and being.ripe else KIND_NAMES[being.kind]
        if isinstance(being, Player | Arrow):
            name = "player-sleep" if isinstance(being, Player) and being.sleeping else f"{name}-{_SIDES[being.facing]}"
        figures[column, row] = _FIGURE_NUMBER[name]
    return _crop(world, world.materials) * len(_FIGURES) + figures


def _join(tiles: np.ndarray) -> np.ndarray:
    """Put tiles (columns, rows, x, y) side by side as one image (x, y)."""
    columns, rows, width, height = tiles.shape
    return tiles.transpose(0, 2, 1, 3).reshape(columns * width, rows * height)


def _crop(world: World, cells: bytearray) -> np.ndarray:
    """Cut the visible cells out of one of the world's maps, (9, 7); 0 outside of the world."""
    west = bytes(_CELLS // 2 * STRIDE + _ROWS // 2)  # the map has its margins of zeros in the east and the south
    start = world.player.x * STRIDE + world.player.y
    return np.frombuffer((west + cells)[start : start + _CELLS * STRIDE], np.uint8).reshape(_CELLS, STRIDE)[:, :_ROWS]


def _draw_even(world: World, daylight: float) -> np.ndarray:
    """Return the packed surroundings (252, 196) in this light, without noise."""
    shown, places = np.unique(_look(world), return_inverse=True)
    lit = _light_palette(daylight, world.player.sleeping).take(_draw_tiles().numbers[shown])
    return _join(lit[places.reshape(_CELLS, _ROWS)])


@lru_cache(maxsize=512)
def _light_palette(daylight: float, sleeping: bool) -> np.ndarray:
    canvas = _light._light(_draw_tiles().palette[None], daylight)
    return _pack((_light._sleep(canvas) if sleeping else canvas)[0])


@cache
def _asleep() -> np.ndarray:
    """Return the packed colors in which a sleeping player sees the grays 0 to 255."""
    return _pack(_light._sleep(np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, 2))[:, 0])


@cache
def _vignette() -> np.ndarray:
    return _light._vignette(NOISE_SHAPE, 0.5)


def _draw_night(world: World) -> np.ndarray:
    """Return the packed surroundings (252, 196) in the dark, with `LocalView`'s operations in their order."""
    if world.noise is None:
        raise RuntimeError("the noise of this night was not kept; make the world with images=True")
    tiles, light = _look(world), world.daylight
    tinted = (1 - light) * (0.5 * (np.arange(5 * 256) // 5) + 0.5 * np.array(_NIGHT_TINT)[:, None])
    result = np.zeros((*NOISE_SHAPE, 4), np.uint8)
    for first in range(0, _CELLS, _COLUMNS_AT_ONCE):
        part = slice(first * _SIDE, (first + _COLUMNS_AT_ONCE) * _SIDE)
        mask = 2 * (0.5 - light) * _vignette()[part]
        noise = mask * (32 + 95 * world.noise[part])
        np.subtract(1, mask, out=mask)
        clear = [_join(channel[tiles[first : first + _COLUMNS_AT_ONCE]]) for channel in _draw_tiles().channels]
        noisy = [(mask * channel + noise).astype(np.int32) for channel in clear]
        for number, faded in enumerate(_fade(*noisy)):
            result[part, :, number] = light * clear[number] + tinted[number].take(faded)
    return result.view(np.uint32)[..., 0]


def _fade(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> list[np.ndarray]:
    """Return five times what Pillow's `ImageEnhance.Color(...).enhance(0.4)` makes of these int32 values, plus 0 to 4.

    Pillow rounds the gray, and cuts 0.6 * gray + 0.4 * value down to an integer.
    """
    gray = 19595 * red
    gray += 38470 * green
    gray += 7471 * blue
    gray += 1 << 15
    gray >>= 16
    gray *= 3
    return [2 * channel + gray for channel in (red, green, blue)]
