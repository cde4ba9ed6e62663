"""Reads a question's content, in the forms that data sets use, into texts and images in order.

Invariant: an image keeps its place between the texts; the error about an unsupported part names its type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.errors import ConfigError
from envs.questions.images import open_image

PLACEHOLDER = "<image>"
"""Marks an image's place in the texts of data sets."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://")
_SUPPORTED = "a question takes parts of type 'text' and 'image'"


def read_messages(messages: Any) -> tuple[str, list[str | None], list[Any]]:
    """The system text, the texts of all user messages with None in place of each image, and their images.

    Raises:
        ConfigError: `messages` is not a list of messages, or has an unsupported role or part.
    """
    if not isinstance(messages, list | tuple):
        raise ConfigError(f"a question must be a text or a list of messages, got {type(messages).__name__}")
    system, texts, images = "", [], []
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
        images += inside
    return system, texts, images


def _read_content(content: Any) -> tuple[list[str | None], list[Any]]:
    if isinstance(content, str):
        return [content], []
    if not isinstance(content, list | tuple):
        raise ConfigError(f"a message's content must be a text or a list of parts, got {type(content).__name__}")
    texts: list[str | None] = []
    images = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image":
            texts.append(None)
            images.append(part.get("image", part))
        else:
            raise ConfigError(f"a question has a content part of {_kind_of(part)}; {_SUPPORTED}")
    return texts, images


def _kind_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        return f"the form {type(part).__name__}"
    keys = ", ".join(map(str, part))
    return f"type {part['type']!r:.60} (keys: {keys})" if "type" in part else f"no type (keys: {keys})"


def lay_out(texts: Sequence[str | None], count: int) -> tuple[str, tuple[str, ...]]:
    """Lay out the texts of a question with `count` images: (whole text, its pieces).

    The whole text has `<image>` in place of each image that has text before it. The pieces are the texts before,
    between and after the images, one more than images; there are none if all images come first.

    A None in `texts` is the place of an image. Without any, the `<image>` marks inside the texts are; without those,
    the images come first.

    Raises:
        ConfigError: there are more or fewer places than images.
    """
    if None not in texts:
        divided = re.split(f"({PLACEHOLDER})", "".join(text or "" for text in texts))
        texts = [None if part == PLACEHOLDER else part for part in divided]
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
        return PLACEHOLDER.join(pieces), tuple(pieces)
    return "".join(pieces).strip(), ()


def open_images(values: Sequence[Any], max_pixels: int) -> tuple[Any, ...]:
    """The images of a question as RGB PIL images.

    Raises:
        ConfigError: one is a URL or not an image.
        ImageError: one cannot be read or has more than `max_pixels` pixels.
    """
    for value in values:
        row = value if isinstance(value, Mapping) else {"path": value}
        if row.get("type", "image") != "image":
            raise ConfigError(f"a question's pictures hold one of {_kind_of(row)}; {_SUPPORTED}")
        for address in (row.get(key) for key in ("path", "image", "url") if not row.get("bytes")):
            if isinstance(address, str) and _URL.match(address):
                raise ConfigError(
                    f"a question's picture is the URL {address[:100]}; URLs are not fetched, so download the file and "
                    "give its path, its bytes or a data URI"
                )
    return tuple(open_image(value, max_pixels) for value in values)
