"""Draws the worlds of a page's episodes: as tiles where they repeat, and as PNG images elsewhere."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.base import make_image
from inspection.view.replay import can_replay, replay
from rollout.tokens.image_files import png_uri, write_png

_TILES_PER_ROW = 32
_SIZES = range(8, 65)
_REPEATED_SHARE = 0.5  # frames are stored as tiles if at most this share of their tiles is new


class Atlas:
    """All distinct tiles of one size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[bytes, int] = {}

    def encode(self, frames: Sequence[np.ndarray]) -> dict[str, Any]:
        """The frames as tile numbers: `first`, then per later frame `changes`, a flat list of (cell, tile) pairs."""
        rows, columns = frames[0].shape[0] // self.size, frames[0].shape[1] // self.size
        cut = [cut_tiles(frame, self.size) for frame in frames]
        numbers = [self._number(tile) for tile in cut[0]]
        changes = []
        for before, now in itertools.pairwise(cut):
            moved = np.flatnonzero((before != now).any(axis=1))
            changes.append([x for cell in moved.tolist() for x in (cell, self._number(now[cell]))])
        return {"tile": self.size, "columns": columns, "rows": rows, "first": numbers, "changes": changes}

    def _number(self, tile: np.ndarray) -> int:
        return self._numbers.setdefault(tile.tobytes(), len(self._numbers))

    def png(self) -> bytes:
        """Return all tiles as one image, 32 per row in the order of their numbers."""
        size, n = self.size, len(self._numbers)
        rows = math.ceil(n / _TILES_PER_ROW)
        sheet = np.zeros((rows * _TILES_PER_ROW, size, size, 3), np.uint8)
        sheet[:n] = np.frombuffer(b"".join(self._numbers), np.uint8).reshape(n, size, size, 3)
        grid = sheet.reshape(rows, _TILES_PER_ROW, size, size, 3).swapaxes(1, 2)
        return encode_png(grid.reshape(rows * size, _TILES_PER_ROW * size, 3))


def cut_tiles(frame: np.ndarray, size: int) -> np.ndarray:
    """Return the frame's square tiles, row by row: uint8 [tiles, size * size * 3]."""
    rows, columns = frame.shape[0] // size, frame.shape[1] // size
    return frame.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(rows * columns, -1)


def choose_tile_size(frames: Sequence[np.ndarray]) -> int | None:
    """Return the tile size in pixels that stores the frames in the fewest bytes; None if their tiles do not repeat."""
    height, width = frames[0].shape[:2]
    sample = frames[:: max(1, len(frames) // 8)]
    best: tuple[float, int] | None = None
    for size in _SIZES:
        if height % size or width % size:
            continue
        tiles = np.concatenate([cut_tiles(frame, size) for frame in sample])
        distinct = len({tile.tobytes() for tile in tiles})
        cost = distinct * size * size + 2 * len(tiles)
        if distinct <= _REPEATED_SHARE * len(tiles) and (best is None or cost < best[0]):
            best = (cost, size)
    return best[1] if best else None


def encode_png(pixels: np.ndarray) -> bytes:
    """Return the image as a PNG file, with Pillow."""
    return write_png(make_image(pixels), compress_level=9 if pixels.size < 1 << 22 else 6)


class Worlds:
    """Replays episodes until `most` of them are drawn, and keeps the tiles that they share.

    Of a training run, each evaluation has a third of what is left, so that the last ones have some, too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.drawn = self.differing = 0
        self._left: dict[tuple[int, str], int] = {}
        """Episodes that may still be drawn of each evaluation; the share of a run is another `most`."""
        self._atlases: dict[int, Atlas] = {}
        self._sizes: dict[Any, int | None] = {}
        self._without: set[str] = set()
        """Environments without `render`; their other episodes are not built."""

    def draw(self, episode: Mapping[str, Any]) -> dict[str, Any] | None:
        """The episode's world for the page, with a `note` instead if the replay went wrong; None for no world."""
        key = self.most, str(episode.get("setting"))
        left = self.most - self.drawn - self.differing
        share = self._left.setdefault(key, math.ceil(left / 3)) if key[1].startswith("update ") else left
        if min(share, left) <= 0 or not can_replay(episode) or episode["env_path"] in self._without:
            return None
        replayed = replay(episode)
        if replayed is None:
            self._without.add(episode["env_path"])
            return None
        self._left[key] = share - 1
        if replayed.note is not None:
            self.differing += 1
            return {"note": replayed.note}
        self.drawn += 1
        return self._encode(episode["env_path"], replayed.frames)

    def images(self) -> dict[int, bytes]:
        """For each tile size in pixels, the PNG image with all tiles."""
        return {size: atlas.png() for size, atlas in self._atlases.items()}

    def _encode(self, env_path: str, frames: Sequence[np.ndarray]) -> dict[str, Any]:
        """The frames as tiles, or as one PNG per distinct frame and their keys in order."""
        shapes = {frame.shape for frame in frames}
        kind = (env_path, *shapes)
        if kind not in self._sizes:
            self._sizes[kind] = choose_tile_size(frames) if len(shapes) == 1 else None
        size = self._sizes[kind]
        if size is not None:
            return self._atlases.setdefault(size, Atlas(size)).encode(frames)
        keys, images = [], {}
        for frame in frames:
            key = hashlib.blake2b(frame.tobytes(), digest_size=8).hexdigest()
            if key not in images:
                images[key] = png_uri(encode_png(frame))
            keys.append(f"world {key}")
        return {"frames": keys, "pictures": images}
