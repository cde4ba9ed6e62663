"""Replays a recorded episode in its environment, and draws its states as images or as an animated GIF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import PICTURE_PLACE, make_image
from inspection.view.prompts import split_prompts, text_of
from rollout.spec import EnvSpec
from slime_verlog import ConfigError


@dataclass
class Replay:
    """A replayed episode."""

    frames: list[np.ndarray] = field(default_factory=list)
    """uint8 [height, width, 3]: the state before each turn, then the last state."""
    note: str | None = None
    """Why there are no frames, if the replay failed or differs from the record."""


def can_replay(episode: Mapping[str, Any]) -> bool:
    """Return whether the record says how to build the environment."""
    has_task = isinstance(episode.get("task"), str) and isinstance(episode.get("seed"), int)
    return bool(episode.get("env_path") and has_task and episode.get("story"))


def replay(episode: Mapping[str, Any]) -> Replay | None:
    """Play the recorded responses again and draw every state; None if the environment has no `render`.

    Nothing is drawn if an observation, an action or a reward differs from the record.
    """
    metadata, options = {"task": episode["task"], "seed": episode["seed"]}, dict(episode.get("options") or {})
    try:
        env = EnvSpec(episode["env_path"], metadata, options, max_turns=episode.get("max_turns")).build()
    except Exception as error:  # an environment may raise anything, which concerns only this episode's images
        return Replay(note=f"The world is not drawn: building the environment raised {_say(error)}.")
    try:
        return _play(env, episode) if callable(getattr(env, "render", None)) else None
    finally:
        env.close()


def _play(env: Any, episode: Mapping[str, Any]) -> Replay:
    messages, turns = split_prompts(episode)
    frames: list[np.ndarray] = []
    try:
        observation = env.reset()
        for number, turn in enumerate(turns, 1):
            frames.append(_copy(env.render()))
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
        frames.append(_copy(env.render()))
    except Exception as error:  # as above
        return Replay(note=f"The world is not drawn: turn {len(frames)} of the replay raised {_say(error)}.")
    return Replay(frames)


def _copy(image: Any) -> np.ndarray:
    pixels = np.array(image, dtype=np.uint8)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"render() must return an array (height, width, 3), got shape {pixels.shape}")
    return pixels


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")


_MIN_PIXELS = 320
_CAPTION_PIXELS = 26


def write_gif(episode: Mapping[str, Any], path: Path, seconds_per_turn: float) -> int:
    """Replay the episode and write its animation; returns its frames. Raises ConfigError if it cannot be drawn."""
    if not can_replay(episode):
        raise ConfigError("the record does not say how to build its environment (env_path, task and seed)")
    replayed = replay(episode)
    if replayed is None:
        raise ConfigError(f"{episode['env_path']} has no render(), so there is nothing to animate")
    if replayed.note is not None:
        raise ConfigError(replayed.note.rstrip("."))
    captions = [_caption(number, turn) for number, turn in enumerate(episode["story"], 1)]
    captions.append(f"end: {episode.get('stop') or 'the last state'}")
    images = [_draw(frame, text) for frame, text in zip(replayed.frames, captions, strict=True)]
    durations = [round(1000 * seconds_per_turn)] * (len(images) - 1) + [1500]
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False)
    return len(images)


def _caption(number: int, turn: Mapping[str, Any]) -> str:
    reward = turn.get("reward") or 0.0
    parts = [f"{number}", "(writes notes)" if "summary" in turn else str(turn.get("executed_action") or "")[:40]]
    parts += ["(invalid)"] if turn.get("valid") is False else []
    parts += [f"{reward:+.2f}"] if reward else []
    return "  ".join(parts)


def _draw(frame: np.ndarray, caption: str) -> Any:
    """The frame, enlarged by a whole factor if it is small, above its caption."""
    from PIL import Image, ImageDraw, ImageFont

    factor = max(1, -(-_MIN_PIXELS // max(frame.shape[:2])))
    image = make_image(np.repeat(np.repeat(frame, factor, 0), factor, 1))
    canvas = Image.new("RGB", (image.width, image.height + _CAPTION_PIXELS), (24, 26, 31))
    canvas.paste(image, (0, 0))
    pen, place = ImageDraw.Draw(canvas), (8, image.height + _CAPTION_PIXELS // 2)
    pen.text(place, caption, fill=(232, 234, 238), anchor="lm", font=ImageFont.load_default(size=14))
    return canvas.quantize(128)
