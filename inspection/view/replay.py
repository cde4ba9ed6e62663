"""Replays a recorded episode in its environment, and draws its states for a page.

A page's worlds are tiles where they repeat, and PNG images elsewhere.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.base import PICTURE_PLACE, make_image, text_of
from inspection.records import split_prompts
from rollout.spec import EnvSpec
from rollout.tokens.image_files import png_uri, write_png

_OWN_GAMES = ("envs.babyai", "envs.babaisai", "envs.crafter", "envs.sokoban")
"""Games whose code is ours and whose options, numbers aside, name nothing that is read or run."""
_NAMED_FILES = ("prompt_template", "levels_path")
_PLAIN_WORD = re.compile(r"[\w.+/ -]{0,100}")
_TILES_PER_ROW = 32
_SIZES = range(8, 65)
_REPEATED_SHARE = 0.5
"""Frames are stored as tiles if at most this share of their tiles is new."""


@dataclass
class Replay:
    """A replayed episode."""

    frames: list[np.ndarray] = field(default_factory=list)
    """uint8 [height, width, 3]: the state before each turn, then the last state."""
    note: str | None = None
    """Why there are no frames, if the replay failed or differs from the record."""
    pictures: list[list[str]] = field(default_factory=list)
    """`data:` URIs of the images that each turn's observation shows."""


def runs_nothing_else(episode: Mapping[str, Any]) -> bool:
    """Whether a replay runs only games of this package: a record may come from elsewhere, and name any code."""
    options = dict(episode.get("options") or {})
    words = [episode["task"], *(value for value in options.values() if isinstance(value, str))]
    return (
        episode["env_path"] in _OWN_GAMES
        and not any(name in options for name in _NAMED_FILES)
        and all(isinstance(value, str | int | float | None) for value in options.values())
        and all(_PLAIN_WORD.fullmatch(word) for word in words)
    )


def replay(episode: Mapping[str, Any]) -> Replay | None:
    """Play the recorded responses again and draw every state.

    None if the environment has no `render`, and the record lacks no image of a prompt. Nothing is drawn if an
    observation, an action or a reward differs from the record.
    """
    metadata, options = {"task": episode["task"], "seed": episode["seed"]}, dict(episode.get("options") or {})
    try:
        env = EnvSpec(episode["env_path"], metadata, options, max_turns=episode.get("max_turns")).build()
    except Exception as error:  # an environment may raise anything, which concerns only this episode's images
        return Replay(note=f"The world is not drawn: building the environment raised {_say(error)}.")
    try:
        is_drawn = callable(getattr(env, "render", None))
        return _play(env, episode, is_drawn) if is_drawn or lacks_pictures(episode) else None
    finally:
        env.close()


def lacks_pictures(episode: Mapping[str, Any]) -> bool:
    """Whether prompts have images that the record does not hold, as those of training runs."""
    return any(_is_empty(part) for message in episode.get("messages") or () for part in _parts(message))


def with_pictures(episode: Mapping[str, Any], pictures: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the episode with these images in the observation of each turn, which is its prompt's last message."""
    messages, turns = split_prompts(episode)
    kept = dict(episode.get("pictures") or {})
    for turn, images in zip(turns, pictures, strict=False):
        message, waiting, parts = messages[turn["prompt"][-1]], iter(images), []
        for part in _parts(message):
            if part.get("type") == "image" and (uri := next(waiting, None)) and part.get("image") is None:
                key = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
                kept[key] = uri
                part = {**part, "image": key}
            parts.append(part)
        if parts:
            turn["prompt"] = [*turn["prompt"][:-1], len(messages)]
            messages.append({**message, "content": parts})
    return {**episode, "messages": messages, "story": turns, "pictures": kept}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_empty(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is None


def _shown(observation: Mapping[str, Any]) -> list[str]:
    """The images of an observation as `data:` URIs, in the order of its message."""
    images = observation.get("multi_modal_data") or {}
    found = [*(images.get("current_image") or ()), *(images.get("image") or ())]
    return [png_uri(encode_png(np.asarray(image, dtype=np.uint8))) for image in found]


def _play(env: Any, episode: Mapping[str, Any], is_drawn: bool) -> Replay:
    messages, turns = split_prompts(episode)
    frames: list[np.ndarray] = []
    pictures: list[list[str]] = []
    try:
        observation = env.reset()
        for number, turn in enumerate(turns, 1):
            frames += [_copy(env.render())] if is_drawn else []
            pictures.append(_shown(observation) if lacks_pictures(episode) else [])
            if "summary" in turn:  # notes, which the environment did not get
                continue
            prompt = "\n".join(text_of(messages[i]) for i in turn["prompt"])
            parts = observation["text"]
            forms = ([parts["short_term_context"], parts["long_term_context"]], [observation["obs_str"]])
            pieces = [[piece.strip() for text in texts for piece in text.split(PICTURE_PLACE)] for texts in forms]
            if not any(all(piece in prompt for piece in form) for form in pieces):
                return Replay(note=f"The world is not drawn: the replay shows another observation in turn {number}.")
            observation, _, info = env.step(turn.get("response") or "")
            same = {
                "action": turn.get("executed_action") in (None, info["executed_action"]),
                "reward": turn.get("reward") is None or abs(turn["reward"] - float(info["reward"])) <= 1e-6,
                "end": turn.get("terminated") is None or bool(turn["terminated"]) == bool(info["terminated"]),
            }
            if wrong := next((name for name, holds in same.items() if not holds), None):
                return Replay(note=f"The world is not drawn: the replay has another {wrong} in turn {number}.")
        frames += [_copy(env.render())] if is_drawn else []
    except Exception as error:  # as above
        return Replay(note=f"The world is not drawn: turn {len(pictures)} of the replay raised {_say(error)}.")
    return Replay(frames, pictures=pictures)


def _copy(image: Any) -> np.ndarray:
    pixels = np.array(image, dtype=np.uint8)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"render() must return an array (height, width, 3), got shape {pixels.shape}")
    return pixels


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")


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

    def __init__(self, most: int, trusted: bool = False) -> None:
        self.most, self.trusted = most, trusted
        self.untrusted: set[str] = set()
        """Environments that are not replayed unless the records are trusted."""
        self.drawn = self.differing = 0
        self._left: dict[tuple[int, str], int] = {}
        """Episodes that may still be drawn of each evaluation; the share of a run is another `most`."""
        self._atlases: dict[int, Atlas] = {}
        self._sizes: dict[Any, int | None] = {}
        self._without: set[str] = set()
        """Environments without `render`; their other episodes are not built."""

    def draw(self, episode: Mapping[str, Any]) -> dict[str, Any] | None:
        """The episode's world for the page, with a `note` instead if the replay went wrong; None for no world.

        `shown` has the images of prompts that the record lacks, for `with_pictures`.
        """
        key = self.most, str(episode.get("setting"))
        left = self.most - self.drawn - self.differing
        share = self._left.setdefault(key, math.ceil(left / 3)) if key[1].startswith("update ") else left
        has_task = isinstance(episode.get("task"), str) and isinstance(episode.get("seed"), int)
        can_replay = episode.get("env_path") and has_task and episode.get("story")
        if min(share, left) <= 0 or not can_replay or episode["env_path"] in self._without:
            return None
        if not self.trusted and not runs_nothing_else(episode):
            if not str(episode["env_path"]).startswith("envs.") or episode["env_path"] in _OWN_GAMES:
                self.untrusted.add(str(episode["env_path"]))
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
        world = self._encode(episode["env_path"], replayed.frames) if replayed.frames else {}
        return world | ({"shown": replayed.pictures} if any(replayed.pictures) else {})

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
