"""The content of a question: texts and pictures in order, in any form that data sets have.

Invariant: a picture keeps its place between the texts, and a part that cannot be shown is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.errors import ConfigError
from envs.pictures import open_picture

PLACEHOLDER = "<image>"
"""Marks a picture's place in the texts of data sets."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://")
_TAKEN = "a question takes parts of type 'text' and 'image'"


@dataclass(frozen=True)
class Layout:
    """A question's text, and the texts around its pictures.

    `text` has `<image>` where a picture stands inside of it. `pieces` are the texts before, between and after the
    pictures, one more than there are pictures; empty where all pictures come first.
    """

    text: str
    pieces: tuple[str, ...] = ()


def read_messages(messages: Any) -> tuple[str, list[str | None], list[Any]]:
    """The system text, the texts of all user messages with None in each picture's place, and the pictures in them.

    Raises:
        ConfigError: it is not a list of messages, or has a role or a part that cannot be shown.
    """
    if not isinstance(messages, list | tuple):
        raise ConfigError(f"a question must be a text or a list of messages, got {type(messages).__name__}")
    system, texts, pictures = "", [], []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else message
        if role not in ("system", "user"):
            raise ConfigError(f"a question's messages may have the roles system and user, got {role!r:.60}")
        found, inside = _read_content(message.get("content") or "")
        if role == "system" and inside:
            raise ConfigError("the system message of a question has a picture; move it into a user message")
        if role == "system":
            system = "".join(text or "" for text in found)
            continue
        texts += ["\n\n"] * bool(texts) + found
        pictures += inside
    return system, texts, pictures


def _read_content(content: Any) -> tuple[list[str | None], list[Any]]:
    if isinstance(content, str):
        return [content], []
    if not isinstance(content, list | tuple):
        raise ConfigError(f"a message's content must be a text or a list of parts, got {type(content).__name__}")
    texts: list[str | None] = []
    pictures = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image":
            texts.append(None)
            pictures.append(part.get("image", part))
        else:
            raise ConfigError(f"a question has a content part of {_kind_of(part)}; {_TAKEN}")
    return texts, pictures


def _kind_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        return f"the form {type(part).__name__}"
    keys = ", ".join(map(str, part))
    return f"type {part['type']!r:.60} (keys: {keys})" if "type" in part else f"no type (keys: {keys})"


def lay_out(texts: Sequence[str | None], count: int) -> Layout:
    """Text and pieces of a question with `count` pictures.

    Places are the Nones, or else the `<image>` marks in the texts; without either, pictures come first.

    Raises:
        ConfigError: there are places, but not as many as pictures.
    """
    if None not in texts:
        texts = [part for text in texts for part in _split(text or "")]
    places = texts.count(None)
    if places and places != count:
        raise ConfigError(
            f"the question's text has places for {places} pictures, but {count} were given; check the data, "
            "env.image_key, or slime's --multimodal-keys"
        )
    pieces = [""]
    for text in texts:
        pieces += [""] if text is None else []
        pieces[-1] += text or ""
    if places and any(piece.strip() for piece in pieces[:-1]):
        pieces = [pieces[0].lstrip(), *pieces[1:-1], pieces[-1].rstrip()]
        return Layout(PLACEHOLDER.join(pieces), tuple(pieces))
    return Layout("".join(pieces).strip())


def _split(text: str) -> list[str | None]:
    first, *rest = text.split(PLACEHOLDER)
    return [first, *(part for piece in rest for part in (None, piece))]


def open_pictures(values: Sequence[Any], most_pixels: int) -> tuple[Any, ...]:
    """The pictures of a question as RGB PIL images.

    Raises:
        ConfigError: one is a URL, or something other than a picture.
        PictureError: one cannot be read, or has more than `most_pixels` pixels.
    """
    return tuple(open_picture(_checked(value), most_pixels) for value in values)


def _checked(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.get("type", "image") != "image":
            raise ConfigError(f"a question's pictures hold one of {_kind_of(value)}; {_TAKEN}")
        addresses = [value.get(key) for key in ("path", "image", "url") if not value.get("bytes")]
    else:
        addresses = [value]
    for address in addresses:
        if isinstance(address, str) and _URL.match(address):
            raise ConfigError(
                f"a question's picture is the URL {address[:100]}; URLs are not fetched, so download the file and give "
                "its path, its bytes or a data URI"
            )
    return value
