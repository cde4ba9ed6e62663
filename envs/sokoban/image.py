"""Draws a room with 32 x 32 pixels per cell, with NumPy alone."""

from functools import cache

import numpy as np

from envs.sokoban.board import Room, State

TILE_PIXELS = 32
_FLOOR, _WALL, _MORTAR = (226, 214, 190), (112, 84, 66), (84, 62, 50)
_TARGET, _BOX, _PLACED, _PLAYER = (200, 60, 60), (190, 130, 60), (70, 160, 80), (60, 90, 200)


def draw_room(room: Room, state: State) -> np.ndarray:
    """Return a uint8 array (32 * height, 32 * width, 3)."""
    rows = []
    for y in range(room.height):
        cells = range(y * room.width, (y + 1) * room.width)
        rows.append(np.concatenate([_tile(*_look(room, state, cell)) for cell in cells], axis=1))
    return np.concatenate(rows)


def _look(room: Room, state: State, cell: int) -> tuple[str, bool]:
    on_target = bool(room.targets >> cell & 1)
    if not room.floor >> cell & 1:
        return "wall", False
    if state.boxes >> cell & 1:
        return "box", on_target
    return ("player" if cell == state.player else "floor"), on_target


@cache
def _tile(thing: str, on_target: bool) -> np.ndarray:
    tile = np.empty((TILE_PIXELS, TILE_PIXELS, 3), np.uint8)
    y, x = np.mgrid[:TILE_PIXELS, :TILE_PIXELS]
    middle = (TILE_PIXELS - 1) / 2
    if thing == "wall":
        tile[:] = _WALL
        tile[(y % 8 == 7) | ((x + 8 * (y // 8 % 2)) % 16 == 15)] = _MORTAR
        return tile
    tile[:] = _FLOOR
    if on_target:
        tile[np.abs(x - middle) + np.abs(y - middle) < 9] = _TARGET
    if thing == "box":
        edge = np.maximum(np.abs(x - middle), np.abs(y - middle))
        tile[edge < 13] = _PLACED if on_target else _BOX
        tile[((edge > 10) & (edge < 13)) | ((np.abs(x - y) < 2) & (edge < 13))] = _MORTAR
    elif thing == "player":
        far = (x - middle) ** 2 + (y - middle) ** 2
        tile[far < 121] = (255, 255, 255)
        tile[far < 90] = _PLAYER
    return tile
