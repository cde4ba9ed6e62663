"""Runs a program and ends everything that it started, when it ends or when this process's stdin is
closed.

    python -I -S reaper.py SECONDS COMMAND...

With SECONDS above 0, the program reads this process's stdin and has that long to end by itself once
it is closed; otherwise it has no stdin and is ended at once. A script without imports from
elsewhere, because it starts once per episode. What the program orphans becomes a child of this
process, so nothing escapes by starting a new session.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>."""
NOT_FOUND = 127
"""Exit code of a program that cannot be started, as in shells."""


def main(seconds: float, command: list[str]) -> int:
    """Returns the program's exit code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # A separate session: a signal to its process group must not reach this process.
        program = subprocess.Popen(
            command, stdin=None if seconds else subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND
    signal.signal(signal.SIGTERM, lambda number, frame: (end_children(), os._exit(128 + number)))
    ended = select.poll()
    ended.register(os.pidfd_open(program.pid), select.POLLIN)
    either = select.poll()
    either.register(os.pidfd_open(program.pid), select.POLLIN)
    either.register(sys.stdin.fileno(), 0)  # nothing is read; only that it is closed is reported
    either.poll()
    ended.poll(seconds * 1000)
    code = program.poll()
    end_children()
    return -signal.SIGKILL if code is None else code


def end_children() -> None:
    """Kill all children until there are none; the children of a killed one become ours."""
    while True:
        children: list[int] = []
        for path in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += map(int, path.read_text().split())
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


if __name__ == "__main__":
    exit_code = main(float(sys.argv[1]), sys.argv[2:])
    os._exit(128 - exit_code if exit_code < 0 else exit_code)
