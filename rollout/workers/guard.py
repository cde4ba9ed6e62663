"""The guard of one environment worker: a process that ends everything that the worker started.

It forks the worker, adopts its orphans, and kills all of them when the worker ends, when the
trainer ends (even by SIGKILL) or on SIGTERM. It runs no environment code, which could hang it.
"""

import contextlib
import ctypes
import os
import pkgutil
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Constants of <linux/prctl.h>."""


class _Terminated(BaseException):
    """SIGTERM arrived."""


def main() -> None:
    """Entry of the guard: `sys.argv` holds the worker's socket, its entry (`module:name`), and the
    trainer's pid."""
    connection = int(sys.argv[1])
    entry = sys.argv[2]
    trainer = int(sys.argv[3])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        pkgutil.resolve_name(entry)()
        return
    # An environment may send them to its process group, in which this process is, too.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # While it is open here, the trainer would not notice that the worker is gone.
    os.close(connection)
    try:
        signal.signal(signal.SIGTERM, _raise)
        while os.getppid() == trainer and worker not in _reap():
            time.sleep(POLL_S)
    except _Terminated:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    os.killpg(0, signal.SIGKILL)  # includes this process, which leads the group


def end_descendants() -> None:
    """Kill all descendants of this process, and those that they start meanwhile."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def descendants(pid: int) -> set[int]:
    """All descendants of `pid`, including zombies; empty on systems without /proc."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children: list[int] = []
        with contextlib.suppress(OSError):  # a process may end while its tasks are listed
            for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children += map(int, path.read_text().split())
        waiting += set(children) - found
        found.update(children)
    return found


def _reap() -> set[int]:
    ended: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.add(pid)
    return ended


def _raise(*_: object) -> None:
    raise _Terminated


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux. On other systems only the worker's process group is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
