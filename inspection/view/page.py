"""Writes one HTML file that loads nothing from elsewhere: template, style, script and compressed
episodes.

A block of episodes is gzip in base64. A chunk has one JSON document per line: first the messages
and images that its episodes share, then its episodes."""

import base64
import gzip
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from inspection.records import Record, find_changes, split_prompts

EPISODES_PER_CHUNK = 32
"""A browser decodes a chunk when one of its episodes is opened or searched."""

_UPDATE = re.compile(r"\b(update|step|evaluation|rollout)[ _](\d+)$")
"""The number of updates in the name of a setting; slime counts rollouts from 0."""


class Packer:
    """Collects episodes; `blocks` may be called at any time, and more episodes added afterwards."""

    def __init__(self) -> None:
        self.rows: list[Record] = []
        self._closed: list[str] = []
        self._start_chunk()

    def _start_chunk(self) -> None:
        self._episodes: list[str] = []
        self._messages: dict[str, int] = {}
        self._images: dict[str, str] = {}

    def add(
        self, episode: Record, run: int = 0, world: Record | None = None, study: str | None = None
    ) -> None:
        """Add an episode of the run with this number, with its world if it was drawn.

        On a page about many runs, all have the number 0, and `study` is the run's name.
        """
        if len(self._episodes) == EPISODES_PER_CHUNK:
            self._closed.append(self._compressed())
            self._start_chunk()
        row = _row(episode, run)
        row |= {"chunk": len(self._closed), "place": len(self._episodes)}
        if study:
            row["study"] = study
        if world:
            row["world"] = 2 if "note" in world else 1
        self.rows.append(row)
        drawn = dict(world or {})
        self._images |= episode.get("pictures") or {}
        self._images |= drawn.pop("pictures", {})
        keys = ("env_path", "task", "options", "max_turns", "metrics", "fault", "credit")
        kept = {key: episode[key] for key in keys if episode.get(key)}
        self._episodes.append(
            to_json({**kept, "turns": self._pack(episode), "world": drawn or None})
        )

    def blocks(self) -> list[str]:
        """Return the chunks, compressed."""
        return [*self._closed, *([self._compressed()] if self._episodes else [])]

    def _pack(self, episode: Record) -> list[Record]:
        """The episode's turns, with numbers in place of the chunk's messages.

        A prompt is the number of messages that it shares with the start of the previous one, then
        the rest.
        """
        messages, turns = split_prompts(episode)
        places = [
            self._messages.setdefault(to_json(message), len(self._messages)) for message in messages
        ]
        packed: list[Record] = []
        before: list[int] = []
        for turn, fresh in zip(turns, find_changes(messages, turns), strict=True):
            prompt = [places[i] for i in turn["prompt"]]
            same = (a == b for a, b in zip(prompt, before, strict=False))
            shared = sum(itertools.takewhile(bool, same))
            packed.append(_turn(turn, [shared, *prompt[shared:]], [places[i] for i in fresh]))
            before = prompt
        return packed

    def _compressed(self) -> str:
        shared = f'{{"messages":[{",".join(self._messages)}],"pictures":{to_json(self._images)}}}'
        return compress("\n".join([shared, *self._episodes]))


def _turn(turn: Record, prompt: list[int], fresh: list[int]) -> Record:
    packed = {
        "prompt": prompt,
        "fresh": fresh,
        "response": turn.get("response") or "",
        "action": turn.get("executed_action"),
        "valid": turn.get("valid"),
        "reward": number(turn.get("reward")),
    }
    for key in ("notes", "lambda_token", "metrics", "moves"):
        if turn.get(key) not in (None, "", {}):
            packed[key] = turn[key]
    if turn.get("progression") is not None:
        packed["progression"] = number(turn["progression"])
    if "summary" in turn:
        packed["summary"] = 1
    ends = [end for end in ("terminated", "truncated", "done") if turn.get(end)]
    if ends:
        packed["end"] = ends[0]
    if tokens := turn.get("tokens"):
        packed["tokens"] = _columns(tokens)
    return packed


def _columns(tokens: Record) -> dict[str, list[Any]]:
    """The texts of a turn's tokens, and each value that every token has."""
    texts = list(tokens.get("text") or ())
    columns: dict[str, list[Any]] = {"text": texts}
    for key, values in tokens.items():
        if key != "text" and values is not None and len(values) == len(texts):
            columns[key] = [number(value) for value in values]
    return columns


def _row(episode: Record, run: int) -> Record:
    """What list, filters and summary need to know about an episode."""
    story = episode["story"]
    played = [turn for turn in story if "summary" not in turn]
    valid = episode.get("valid_action_ratio")
    if valid is None and played and played[0].get("valid") is not None:
        valid = sum(bool(turn["valid"]) for turn in played) / len(played)
    success = episode.get("success")
    setting = _text(episode.get("setting"), "-")
    row = {
        "setting": setting,
        "player": _text(episode.get("player"), ""),
        "task": _text(episode.get("task_name") or episode.get("task"), "-"),
        "seed": episode.get("seed"),
        "stop": _text(episode.get("stop"), ""),
        "success": None if success is None else bool(success),
        "return": number(episode.get("return")),
        "progression": number(episode.get("progression")),
        "turns": len(played) if episode.get("turns") is None else episode["turns"],
        "valid": number(valid),
    }
    if run:
        row["run"] = run
    if update := _UPDATE.search(setting):
        row["update"] = int(update[2]) + (update[1] == "rollout")
    if branch := episode.get("branch"):
        row["branch"] = {key: branch.get(key) for key in ("run", "episode", "turn", "player")}
    if episode.get("fault"):
        row["fault"] = str(episode["fault"])[:300]
    if len(story) > len(played):
        row |= {"answers": len(story), "notes": len(story) - len(played)}
    if any(turn.get("tokens") for turn in story):
        row["tokens"] = 1
    return row


def _text(value: Any, default: str) -> str:
    return default if value is None or value == "" else str(value)


def number(value: Any) -> float | int | None:
    """Return a fraction with four significant digits, as JSON can carry it; None for what is not a
    finite number."""
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    rounded = value if value.is_integer() else float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def to_json(value: Any) -> str:
    """Compact JSON on one line; numbers that JSON lacks become null."""
    try:
        return json.dumps(
            value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str
        )
    except ValueError:
        return to_json(json.loads(json.dumps(value, default=str), parse_constant=lambda _: None))


def compress(text: str) -> str:
    """gzip in base64; lone surrogates, which UTF-8 lacks, become question marks."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode(
        "ascii"
    )


_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = (
    *("dom", "data", "state", "charts", "run", "summary", "list", "search"),
    *("answer", "credit", "transcript", "world", "episode", "keys", "main"),
)


def build_page(title: str, head: Record, chunks: Sequence[str]) -> str:
    """Return the page as text, with the episodes as `Packer.blocks` returns them.

    `head` is what the page needs at once: the runs' names, and one row per episode.
    """
    style = _read("style.css")
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    blocks = [_block("head", compress(to_json(head)))]
    blocks += [_block(f"chunk-{number}", chunk) for number, chunk in enumerate(chunks)]
    # This style, this script, embedded images, and no HTML made from strings.
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; require-trusted-types-for "
        "'script'; trusted-types 'none'"
    )
    page = Template(_read("page.html"))
    data = "\n".join(blocks)
    return page.substitute(
        policy=policy, title=html.escape(title), style=style, script=script, data=data
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _block(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="{name}">{text}</script>'


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
