"""How busy a resource is: the time with at least one request in flight, and the mean number of
requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Usage(NamedTuple):
    """Totals of a period; `request_s` divided by `seconds` is the mean number of requests in
    flight."""

    seconds: float
    busy_s: float
    """Seconds with at least one request in flight."""
    request_s: float
    """Seconds in flight, summed over all requests."""


class ProcessUsage(NamedTuple):
    """Totals of one process that plays."""

    engine: Usage
    """Its requests to the engine."""
    env: Usage
    """Its commands to environment workers, waiting ones included."""
    cpu_s: float
    """CPU seconds of its event loop's thread."""
    retries: int
    """Failed attempts that were repeated."""

    def plus(self, other: "ProcessUsage", sign: int = 1) -> "ProcessUsage":
        """Add the totals of the same process in another period; with `sign` -1, subtract them."""
        pairs = zip(self[:2], other[:2], strict=True)
        engine, env = (Usage(*(a + sign * b for a, b in zip(x, y, strict=True))) for x, y in pairs)
        return ProcessUsage(
            engine, env, self.cpu_s + sign * other.cpu_s, self.retries + sign * other.retries
        )


UNUSED = ProcessUsage(Usage(0.0, 0.0, 0.0), Usage(0.0, 0.0, 0.0), 0.0, 0)


class Utilization:
    """Counts the requests in flight over time; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.in_flight = 0
        self._clock = clock
        self._usage = Usage(clock(), 0.0, 0.0)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in flight inside the `with` block."""
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        last, busy_s, request_s = self._usage
        now = self._clock()
        busy_s += (now - last) * (self.in_flight > 0)
        self._usage = Usage(now, busy_s, request_s + (now - last) * self.in_flight)
        self.in_flight += change

    def snapshot(self) -> Usage:
        """The totals up to now; a period's are the difference between two snapshots."""
        self._count(0)
        return self._usage
