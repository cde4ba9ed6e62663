"""Draws the worlds of a page's episodes, as tiles where they repeat and as PNG pictures elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inspection.view.replay import can_replay, replay
from inspection.view.tiles import Atlas, choose_tile_size, encode_png


class Worlds:
    """Replays episodes until `most` of them are drawn, and keeps the tiles that they share."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.drawn = self.differing = 0
        self._atlases: dict[int, Atlas] = {}
        self._sizes: dict[Any, int | None] = {}
        self._without: set[str] = set()
        """Environments without `render`; their other episodes are not built."""

    def draw(self, episode: Mapping[str, Any]) -> dict[str, Any] | None:
        """The episode's world for the page, with a `note` instead if the replay went wrong; None for no world."""
        if self.drawn + self.differing >= self.most or not can_replay(episode):
            return None
        if episode["env_path"] in self._without:
            return None
        replayed = replay(episode)
        if replayed is None:
            self._without.add(episode["env_path"])
            return None
        if replayed.note is not None:
            self.differing += 1
            return {"note": replayed.note}
        self.drawn += 1
        return self._encode(episode["env_path"], replayed.frames)

    def pictures(self) -> dict[int, bytes]:
        """For each tile size in pixels, the PNG picture with all tiles."""
        return {size: atlas.png() for size, atlas in self._atlases.items()}

    def _encode(self, env_path: str, frames: Sequence[np.ndarray]) -> dict[str, Any]:
        shapes = {frame.shape for frame in frames}
        if len(shapes) > 1:
            return _as_pictures(frames)
        kind = (env_path, *shapes)
        if kind not in self._sizes:
            self._sizes[kind] = choose_tile_size(frames)
        size = self._sizes[kind]
        if size is None:
            return _as_pictures(frames)
        return self._atlases.setdefault(size, Atlas(size)).encode(frames)


def _as_pictures(frames: Sequence[np.ndarray]) -> dict[str, Any]:
    """One PNG per distinct frame, and their keys in order."""
    keys, pictures = [], {}
    for frame in frames:
        key = hashlib.blake2b(frame.tobytes(), digest_size=8).hexdigest()
        if key not in pictures:
            pictures[key] = "data:image/png;base64," + base64.b64encode(encode_png(frame)).decode("ascii")
        keys.append(f"world {key}")
    return {"frames": keys, "pictures": pictures}
