"""Counts the CPU cores that this process may use, which `taskset` and containers limit."""

from __future__ import annotations

import os


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
