"""A running sandbox as its processes: started, measured and ended together.

bwrap returns when its command has ended, while the rest of its process namespace may still be dying. What counts is
the namespace's first process: the kernel lets it go only after every other process in it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from envs.errors import EnvironmentFault

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
_END_S = 30.0


class Namespace:
    """One bwrap process and the namespace that it made. `end` must be called."""

    def __init__(self, argv: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        info_read, info_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [argv[0], "--info-fd", str(info_write), *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*pass_fds, info_write),
                start_new_session=True,
                env={},
            )
            os.close(info_write)
            info_write = -1
            self._first = _open_first(info_read)
        finally:
            os.close(info_read)
            if info_write >= 0:
                os.close(info_write)

    def end(self) -> None:
        """Kill what still runs, and return when nothing of the namespace is alive.

        Raises:
            EnvironmentFault: the kernel does not let go of it, as with a dead network disk.
        """
        if self._first is None:
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            gone, _, _ = select.select([self._first], [], [], _END_S)
            os.close(self._first)
            if not gone:
                self.process.kill()
                raise EnvironmentFault(f"a sandbox (bwrap, pid {self.process.pid}) cannot be ended")
        self.process.wait()

    def uses_more_than(self, limit_kb: int) -> bool:
        """Whether its processes together use more memory than that, shared pages counted once."""
        pids = list(descendants(self.process.pid))
        return sum(map(_resident_kb, pids)) > limit_kb and sum(map(_proportional_kb, pids)) > limit_kb


def _open_first(info_fd: int) -> int | None:
    """A handle on the namespace's first process, from what bwrap tells; None if bwrap made no namespace."""
    told, deadline = b"", time.monotonic() + _END_S
    while b"}" not in told:
        ready, _, _ = select.select([info_fd], [], [], max(deadline - time.monotonic(), 0))
        data = os.read(info_fd, 4096) if ready else b""
        if not data:
            return None
        told += data
    try:
        return os.pidfd_open(json.loads(told)["child-pid"])
    except ProcessLookupError:
        return None


def _children(pid: int) -> list[int]:
    """Children of `pid`; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process itself may end while its tasks are listed
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """All processes below `pid`, as far as they still live."""
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        yield child
        waiting += _children(child)


def _resident_kb(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KB
    except (OSError, IndexError):
        return 0


def _proportional_kb(pid: int) -> int:
    """Like `_resident_kb`, with shared pages divided among those who share; forks share almost everything."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        pass
    return _resident_kb(pid)
