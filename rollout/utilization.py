"""How busy something is kept: time with at least one request in flight, and how many there were."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Load:
    """Counts the requests in flight over time; `clock` gives seconds."""

    clock: Callable[[], float] = time.perf_counter
    in_flight: int = 0
    busy_s: float = 0.0
    request_s: float = 0.0
    _changed: float = 0.0

    def __post_init__(self) -> None:
        self._changed = self.clock()

    def change(self, by: int) -> None:
        """A request starts (+1) or ends (-1)."""
        now = self.clock()
        if self.in_flight:
            self.busy_s += now - self._changed
            self.request_s += self.in_flight * (now - self._changed)
        self._changed = now
        self.in_flight += by

    def snapshot(self) -> tuple[float, float, float]:
        """What `since` compares with."""
        self.change(0)
        return self._changed, self.busy_s, self.request_s

    def since(self, earlier: tuple[float, float, float]) -> tuple[float, float, float]:
        """Seconds passed, seconds with a request in flight, request-seconds since the snapshot."""
        now = self.snapshot()
        return now[0] - earlier[0], now[1] - earlier[1], now[2] - earlier[2]
