"""Draws the grid for vision models: plain shapes on black, words on light blocks."""

from functools import cache
from typing import Any

from envs.babaisai.world import World
from envs.base import import_pillow

TILE_PIXELS = 32
_COLORS = {
    "red": (220, 60, 60),
    "green": (70, 190, 90),
    "blue": (80, 120, 240),
    "grey": (120, 120, 120),
    "white": (245, 245, 245),
}
_NOSES = {
    "up": [(16, 4), (27, 27), (5, 27)],
    "right": [(28, 16), (5, 27), (5, 5)],
    "down": [(16, 28), (5, 5), (27, 5)],
    "left": [(4, 16), (27, 5), (27, 27)],
}


def draw_world(world: World) -> Any:
    """Draw the top piece of every cell; return an RGB `PIL.Image.Image` with 32 x 32 pixels per cell.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    image = import_pillow().new("RGB", (world.width * TILE_PIXELS, world.height * TILE_PIXELS))
    for index, cell in enumerate(world.cells):
        if cell:
            y, x = divmod(index, world.width)
            piece = cell[-1]
            facing = world.facing.get(piece, "right") if piece.name == "baba" and piece.kind == "thing" else "right"
            tile = _draw_tile("text" if piece.is_text else piece.name, piece.name, piece.color, facing)
            image.paste(tile, (x * TILE_PIXELS, y * TILE_PIXELS))
    return image


@cache
def _draw_tile(shape: str, word: str, color: str | None, facing: str) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    tile = Image.new("RGB", (TILE_PIXELS, TILE_PIXELS))
    pen = ImageDraw.Draw(tile)
    fill = _COLORS.get(color or "white", _COLORS["white"])
    if shape == "text":
        pen.rectangle((1, 1, 30, 30), fill=(245, 225, 160))
        pen.text((16, 16), word.upper(), fill=(30, 30, 30), anchor="mm", font=ImageFont.load_default(size=10))
    elif shape == "border":
        pen.rectangle((0, 0, 31, 31), fill=fill)
    elif shape == "wall":
        pen.rectangle((4, 4, 27, 27), fill=fill)
    elif shape == "ball":
        pen.ellipse((5, 5, 26, 26), fill=fill)
    elif shape == "door":
        pen.rectangle((6, 2, 25, 29), outline=fill, width=3)
        pen.ellipse((18, 14, 22, 18), fill=fill)
    elif shape == "key":
        pen.ellipse((11, 3, 21, 13), outline=fill, width=3)
        pen.rectangle((15, 13, 17, 28), fill=fill)
        pen.rectangle((10, 20, 15, 22), fill=fill)
        pen.rectangle((10, 26, 15, 28), fill=fill)
    else:
        pen.polygon(_NOSES[facing], fill=fill)
    return tile
