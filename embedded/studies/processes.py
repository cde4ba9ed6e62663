"""Runs independent jobs side by side, each in its own process, and reports those that fail or are killed."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from slime_verlog import INTERRUPTED, SlimeVerlogError

PATIENCE_S = 15.0  # seconds that interrupted jobs get to end


def run_processes(
    jobs: Mapping[str, tuple[Any, ...]],
    target: Callable[..., None],
    at_once: int,
    ended: Callable[[], None] = lambda: None,
) -> list[str]:
    """Call `target` with each job's arguments, `at_once` jobs at a time; returns a sentence per job that failed.

    A failure does not stop the other jobs. If this process is interrupted or killed, the jobs are interrupted, too.
    """
    context = multiprocessing.get_context("spawn")
    waiting, failures = deque(jobs.items()), []
    running: dict[str, BaseProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, arguments = waiting.popleft()
                running[name] = context.Process(target=_job, args=(name, target, arguments))
                running[name].start()
            wait([process.sentinel for process in running.values()])
            for name in [name for name, process in running.items() if not process.is_alive()]:
                code = running.pop(name).exitcode
                print(f"{name}: {how_it_ended(code) if code else 'done'}", flush=True)
                failures += [f"{name} {how_it_ended(code)}"] if code else []
                ended()
    finally:
        for process in running.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        for process in running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
    return failures


def how_it_ended(code: int) -> str:
    """Put a process's exit code other than 0 in words."""
    if code > 0:
        return f"failed with exit code {code}"
    number = signal.Signals(-code)
    hint = " (often for lack of memory; fewer --jobs need less)" if number is signal.SIGKILL else ""
    return f"was killed by {number.name}{hint}"


def _job(name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(*arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SlimeVerlogError as error:
        sys.exit(f"error: {name}: {error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)


def _interrupt(*_: object) -> None:
    # A terminal interrupts all processes, and the parent may repeat it; the second must not disturb the ending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
