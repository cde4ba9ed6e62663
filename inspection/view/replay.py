"""Replays a recorded episode in its environment, and draws its states for a page."""

import base64
import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.base import PICTURE_PLACE, make_image, text_of
from envs.errors import describe
from inspection.records import Record, env_spec_of, split_prompts

_OWN_GAMES = ("envs.babyai", "envs.babaisai", "envs.crafter", "envs.sokoban")
"""Games whose code is ours and whose options, numbers aside, name nothing that is read or run."""
_NAMED_FILES = ("prompt_template", "levels_path")
_PLAIN_WORD = re.compile(r"[\w.+/ -]{0,100}")


@dataclass
class Replay:
    """A replayed episode."""

    frames: list[np.ndarray] = field(default_factory=list)
    """uint8 [height, width, 3]: the state before each turn, then the last state."""
    note: str | None = None
    """Why there are no frames, if the replay failed or differs from the record."""


def runs_nothing_else(episode: Record) -> bool:
    """Whether a replay runs only games of this package: a record may come from elsewhere, and name
    any code."""
    options = dict(episode.get("options") or {})
    if episode["env_path"] not in _OWN_GAMES or any(name in options for name in _NAMED_FILES):
        return False
    if not all(isinstance(value, str | int | float | None) for value in options.values()):
        return False
    words = [episode["task"], *(value for value in options.values() if isinstance(value, str))]
    return all(_PLAIN_WORD.fullmatch(word) for word in words)


def replay(episode: Record) -> Replay | None:
    """Play the recorded responses again and draw every state; None if the environment has no
    `render`.

    Nothing is drawn if an observation, an action or a reward differs from the record.
    """
    try:
        env = env_spec_of(episode).build()
    except Exception as error:
        # An environment may raise anything, which concerns only this episode's images.
        return _undrawn(f"building the environment raised {describe(error)}")
    try:
        return _play(env, episode) if callable(getattr(env, "render", None)) else None
    finally:
        env.close()


def _play(env: Any, episode: Record) -> Replay:
    messages, turns = split_prompts(episode)
    frames: list[np.ndarray] = []
    number = 0
    try:
        observation = env.reset()
        for number, turn in enumerate(turns, 1):
            frames.append(_copy(env.render()))
            if "summary" in turn:  # notes, which the environment did not get
                continue
            prompt = "\n".join(text_of(messages[i]) for i in turn["prompt"])
            if not _is_in(observation, prompt):
                return _undrawn(f"the replay shows another observation in turn {number}")
            observation, _, info = env.step(turn.get("response") or "")
            if wrong := _difference(turn, info):
                return _undrawn(f"the replay has another {wrong} in turn {number}")
        frames.append(_copy(env.render()))
    except Exception as error:  # as above
        return _undrawn(f"turn {number} of the replay raised {describe(error)}")
    return Replay(frames)


def _undrawn(reason: str) -> Replay:
    return Replay(note=f"The world is not drawn: {reason}")


def _is_in(observation: Record, prompt: str) -> bool:
    """Whether a prompt shows the observation: its parts, or its text as a whole."""
    parts = observation["text"]
    forms = ([parts["short_term_context"], parts["long_term_context"]], [observation["obs_str"]])
    for texts in forms:
        pieces = [piece.strip() for text in texts for piece in text.split(PICTURE_PLACE)]
        if all(piece in prompt for piece in pieces):
            return True
    return False


def _difference(turn: Record, info: Record) -> str | None:
    """What a step of the replay has differently from the record; None if nothing."""
    action = turn.get("executed_action")
    reward = turn.get("reward")
    ended = turn.get("terminated")
    if action is not None and action != info["executed_action"]:
        return "action"
    if reward is not None and abs(reward - float(info["reward"])) > 1e-6:
        return "reward"
    if ended is not None and bool(ended) != bool(info["terminated"]):
        return "end"
    return None


def _copy(image: Any) -> np.ndarray:
    pixels = np.array(image, dtype=np.uint8)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"render() must return an array (height, width, 3), got shape {pixels.shape}"
        )
    return pixels


def encode_frames(frames: Sequence[np.ndarray]) -> Record:
    """The frames for the page: a key per frame in order, and an image (lossless WebP) per key."""
    keys: list[str] = []
    images: dict[str, str] = {}
    for frame in frames:
        digest = hashlib.blake2b(frame.tobytes(), digest_size=8).hexdigest()
        key = f"world {digest}"
        keys.append(key)
        if key not in images:
            buffer = io.BytesIO()
            make_image(frame).save(buffer, "webp", lossless=True)
            images[key] = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode(
                "ascii"
            )
    return {"frames": keys, "pictures": images}


class Worlds:
    """Replays episodes until `most` of them are drawn.

    Of a training run, each evaluation has a third of what is left, so that the last ones have some,
    too.
    """

    def __init__(self, most: int, trusted: bool = False) -> None:
        self.most = most
        self.trusted = trusted
        self.untrusted: set[str] = set()
        """Environments that are not replayed unless the records are trusted."""
        self.drawn = self.differing = 0
        self._left: dict[tuple[int, str], int] = {}
        """Episodes that may still be drawn of each evaluation; the share of a run is another
        `most`."""
        self._without: set[str] = set()
        """Environments without `render`; their other episodes are not built."""

    def draw(self, episode: Record) -> Record | None:
        """The episode's world for the page, with a `note` instead if the replay went wrong; None
        for no world."""
        setting = str(episode.get("setting"))
        left = self.most - self.drawn - self.differing
        share = left
        if setting.startswith("update "):
            share = self._left.setdefault((self.most, setting), math.ceil(left / 3))
        if min(share, left) <= 0 or not self._may_replay(episode):
            return None
        replayed = replay(episode)
        if replayed is None:
            self._without.add(episode["env_path"])
            return None
        self._left[self.most, setting] = share - 1
        if replayed.note is not None:
            self.differing += 1
            return {"note": replayed.note}
        self.drawn += 1
        return encode_frames(replayed.frames)

    def _may_replay(self, episode: Record) -> bool:
        """Whether the record says what to replay, and its code may run."""
        env_path = episode.get("env_path")
        has_task = isinstance(episode.get("task"), str) and isinstance(episode.get("seed"), int)
        if not env_path or not has_task or not episode.get("story") or env_path in self._without:
            return False
        if self.trusted or runs_nothing_else(episode):
            return True
        if not env_path.startswith("envs.") or env_path in _OWN_GAMES:
            self.untrusted.add(env_path)
        return False
