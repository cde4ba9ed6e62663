"""Watches another process: the CPU time that it has used, and whether it sleeps (Linux only)."""

from __future__ import annotations

import time
from pathlib import Path


class Host:
    """The process whose CPU time drives the simulated clock."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | 2
        """The process's CPU clock, as `clock_getcpuclockid` gives it."""
        self._tasks = Path(f"/proc/{pid}/task")

    def cpu_s(self) -> float:
        """CPU seconds of all its threads.

        Raises:
            OSError: the process has ended.
        """
        return time.clock_gettime(self._clock)

    def asleep(self) -> bool:
        """Whether none of its threads runs, waits for a CPU, or waits for a disk."""
        for task in self._tasks.iterdir():
            try:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue  # this thread has just ended
            if state not in "SZ":
                return False
        return True
