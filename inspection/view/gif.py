"""Exports one episode as an animated GIF, with turn, action and reward below each picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import make_image
from inspection.view.replay import can_replay, replay
from slime_verlog import ConfigError

_LEAST_PIXELS = 320
_CAPTION_PIXELS = 26
_LAST_FRAME_MS = 1500


def write_gif(episode: Mapping[str, Any], path: Path, seconds_per_turn: float) -> int:
    """Replay the episode and write its animation; return the number of frames.

    Raises:
        ConfigError: the record does not name its environment, the environment draws nothing, or the replay differs.
        MissingDependencyError: Pillow is not installed.
    """
    if not can_replay(episode):
        raise ConfigError("the record does not say how to build its environment (env_path, task and seed)")
    replayed = replay(episode)
    if replayed is None:
        raise ConfigError(f"{episode['env_path']} has no render(), so there is nothing to animate")
    if replayed.note is not None:
        raise ConfigError(replayed.note.rstrip("."))
    captions = [_caption(number, turn) for number, turn in enumerate(episode["story"], 1)]
    captions.append(f"end: {episode.get('stop') or 'the last state'}")
    pictures = [_draw(frame, text) for frame, text in zip(replayed.frames, captions, strict=True)]
    durations = [round(1000 * seconds_per_turn)] * (len(pictures) - 1) + [_LAST_FRAME_MS]
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=False)
    return len(pictures)


def _caption(number: int, turn: Mapping[str, Any]) -> str:
    reward = turn.get("reward") or 0.0
    parts = [f"{number}", str(turn.get("executed_action") or "")[:40]]
    parts += ["(invalid)"] if turn.get("valid") is False else []
    parts += [f"{reward:+.2f}"] if reward else []
    return "  ".join(parts)


def _draw(frame: np.ndarray, caption: str) -> Any:
    """The frame, enlarged by a whole factor if it is small, above its caption."""
    from PIL import Image, ImageDraw, ImageFont

    factor = max(1, -(-_LEAST_PIXELS // max(frame.shape[:2])))
    picture = make_image(np.repeat(np.repeat(frame, factor, 0), factor, 1))
    canvas = Image.new("RGB", (picture.width, picture.height + _CAPTION_PIXELS), (24, 26, 31))
    canvas.paste(picture, (0, 0))
    pen, place = ImageDraw.Draw(canvas), (8, picture.height + _CAPTION_PIXELS // 2)
    pen.text(place, caption, fill=(232, 234, 238), anchor="lm", font=ImageFont.load_default(size=14))
    return canvas.quantize(128)
