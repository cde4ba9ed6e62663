"""Times parts of an environment's step, such as tool calls and judges; a worker sends the times with its reply."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Part = tuple[str, float, float]
"""Name, start and end, in seconds of `time.perf_counter`."""

_parts: ContextVar[list[Part] | None] = ContextVar("parts of the current step", default=None)


def collect() -> list[Part]:
    """Return a new list, which gets what `timed` measures from now on in this thread."""
    parts: list[Part] = []
    _parts.set(parts)
    return parts


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Measure the block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        parts = _parts.get()
        if parts is not None:
            parts.append((name, began, time.perf_counter()))
