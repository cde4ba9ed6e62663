"""Token ids in 4 bytes each, which may grow: all prompts of an episode are prefixes of one shared
buffer.

So the prompts of an episode take linear memory, and a request encodes only the JSON of what is new
in it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import orjson


class Buffer:
    """The ids that the prompts of one episode share, and the JSON of the first of them once the ids
    have grown."""

    __slots__ = ("encoded", "ids", "json", "lock")

    def __init__(self, ids: array[int]) -> None:
        self.ids = ids
        self.json: bytearray | None = None
        self.encoded = 0
        """Number of ids in `json`."""
        self.lock = threading.Lock()


class TokenPrefix(Sequence[int]):
    """The first tokens of a shared buffer; reads like a list, equals a list of the same ids and
    pickles as a list."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._buffer = Buffer(_array(ids))
        self._length = len(self._buffer.ids)

    def extended(self, *more: Sequence[int]) -> TokenPrefix:
        """This prefix followed by more ids; the buffer is copied only if another prefix already
        grew from here."""
        grown = TokenPrefix.__new__(TokenPrefix)
        buffer = self._buffer
        with buffer.lock:
            if len(buffer.ids) > self._length:
                buffer = Buffer(buffer.ids[: self._length])
            for ids in more:
                buffer.ids.extend(_array(ids))
            buffer.json = buffer.json or bytearray()
            grown._buffer = buffer
            grown._length = len(buffer.ids)
        return grown

    def since(self, earlier: Sequence[int] | None) -> tuple[int, array[int]]:
        """Return the number of first ids that it shares with a prefix it grew from, 0 otherwise,
        and those after."""
        grown = (
            isinstance(earlier, TokenPrefix)
            and earlier._buffer is self._buffer
            and earlier._length <= self._length
        )
        shared = len(earlier) if grown and earlier is not None else 0
        return shared, self._buffer.ids[shared : self._length]

    def json(self, before: bytes = b"[", after: bytes = b"]") -> bytes:
        """The ids as JSON; `before` and `after` replace the list's brackets."""
        buffer = self._buffer
        with buffer.lock:
            if buffer.json is None or buffer.encoded > self._length:
                return b"".join((before, _json(buffer.ids[: self._length]), after))
            if new := buffer.ids[buffer.encoded : self._length]:
                buffer.json += b"," if buffer.encoded else b""
                buffer.json += _json(new)
                buffer.encoded = self._length
            return b"".join((before, buffer.json, after))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._buffer.ids[start:stop:step].tolist() if step > 0 else self.tolist()[index]
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._buffer.ids[index if index >= 0 else index + self._length]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def tolist(self) -> list[int]:
        """The ids as a new list."""
        return self._buffer.ids[: self._length].tolist()

    def to_numpy(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The ids as a new int32 array."""
        # The buffer cannot grow while an array shares its memory, so the array is copied under the
        # lock.
        with self._buffer.lock:
            ids = self._buffer.ids
            return (
                np.frombuffer(ids, np.int32)[: self._length].copy()
                if ids
                else np.empty(0, np.int32)
            )

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, list | tuple | TokenPrefix):
            return NotImplemented
        return len(self) == len(other) and self.tolist() == list(other)

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> Any:
        return list, (self.tolist(),)


def _array(ids: Iterable[int]) -> array[int]:
    if isinstance(ids, TokenPrefix):
        return ids._buffer.ids[: ids._length]
    return array("i", ids)


def _json(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


def token_prefix(ids: Sequence[int]) -> TokenPrefix:
    """The ids as a `TokenPrefix`; unchanged if they are one."""
    return ids if isinstance(ids, TokenPrefix) else TokenPrefix(ids)
