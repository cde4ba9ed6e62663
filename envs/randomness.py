"""Gives each episode its own state of the process-wide random generators, for games that draw from
them."""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np


class OwnRandomness:
    """One episode's state of Python's and NumPy's global generators.

    Wrap every call of the game in `in_place()`. Then its numbers depend on the seed and on the
    game's own calls alone, and the process's generators are left as they were. A lock keeps other
    episodes out. Threads that draw from the global generators without this class can still
    interfere, so such games belong in worker processes (`env_backend: process` or `ray`), whose
    only thread plays episodes.
    """

    _lock = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Switch to this episode's states, then back to those of the process."""
        with self._lock:
            outside = (random.getstate(), np.random.get_state())
            self._set(self._states)
            try:
                yield
            finally:
                self._states = (random.getstate(), np.random.get_state())
                self._set(outside)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
