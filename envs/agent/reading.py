"""Reads the body of a request. Runs on a thread, and refuses what would take long or much memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pydantic_core

from envs.agent.request import CHARS_PER_TOKEN, Message, Request, RequestError
from envs.errors import MissingDependencyError
from envs.questions.pictures import PictureError, open_picture

BYTES_PER_VALUE = 32
"""A request of n bytes may hold n / 32 JSON values, because a value of three bytes takes 64 in memory."""
PIXELS_PER_BYTE = 2
"""Pixels that the pictures of a request may have together, per byte of the longest request; a pixel takes 4 bytes."""


def read_request(
    read: Callable[[Mapping[str, Any]], Request],
    path: str,
    raw: bytearray,
    is_retry: bool,
    thread: str,
    max_bytes: int,
) -> Request:
    """Read a request from its body, which is emptied.

    Args:
        read: the API's function from a JSON object to a request.
        thread: the name that the agent gives the request's thread; empty if it gives none.
        max_bytes: the session's budget, from which those of values and pixels follow.

    Raises:
        RequestError: it cannot be read, or it has too many values or pixels.
    """
    if sum(map(raw.count, (b"[", b"{", b","))) > max_bytes // BYTES_PER_VALUE:
        raise RequestError(f"the request has more than {max_bytes // BYTES_PER_VALUE} values (env.request_mb)", 413)
    try:
        body = pydantic_core.from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request is not a JSON object")
    request, size = read(body), len(raw)
    digest = hashlib.blake2b(path.encode() + b"\0", digest_size=16)
    digest.update(raw)
    raw.clear()
    check_pictures(request.messages, max_bytes * PIXELS_PER_BYTE)
    tokens = (size - sum(map(len, _pictures(request.messages)))) // CHARS_PER_TOKEN
    known = {"digest": digest.hexdigest(), "is_retry": is_retry, "thread": thread or request.thread}
    return replace(request, size=size, tokens=tokens, **known)


def check_pictures(messages: Sequence[Message], max_pixels: int) -> None:
    """Decode each picture once; refuse one that cannot be read, and more than `max_pixels` pixels together."""
    left = max_pixels
    for url in _pictures(messages):
        try:
            picture = open_picture(url, left)
        except (PictureError, MissingDependencyError) as error:
            limit = f"; the pictures of a request may have {max_pixels} pixels together (env.request_mb)"
            raise RequestError(f"{error}{limit}") from error
        left -= picture.width * picture.height


def with_pictures(messages: Sequence[Message]) -> list[Message]:
    """The messages with decoded pictures in place of data URIs."""
    return [{**message, "content": _decoded(message["content"])} for message in messages]


def _decoded(content: str | list[Message]) -> str | list[Message]:
    if isinstance(content, str):
        return content
    return [{**part, "image": open_picture(part["image"])} if part["type"] == "image" else part for part in content]


def _pictures(messages: Sequence[Message]) -> Iterator[str]:
    """The data URIs of all pictures."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part["image"] for part in message["content"] if part["type"] == "image")
