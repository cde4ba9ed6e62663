"""The processes of a running sandbox, which are started, measured and ended together.

bwrap returns when its command has ended, while the rest of its process namespace may still be dying. So the
namespace's first process is watched: the kernel removes it after all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from envs.errors import EnvironmentFault
from envs.swe.sandbox.held_files import HeldFiles, held_files
from envs.swe.sandbox.seccomp import seccomp_filter
from envs.swe.sandbox.sockets import socket_bytes

_END_S = 30.0
OUTER_FILTER, INNER_FILTER = "@outer-filter", "@inner-filter"
"""Words of a command line that stand for bwrap's option with the filter of that layer."""


class Namespace:
    """One bwrap process and the namespace that it made. `end` must be called."""

    def __init__(self, argv: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        with contextlib.ExitStack() as ends:
            info_read, info_write = (
                ends.enter_context(os.fdopen(fd, mode, 0)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
            )
            fds = [*pass_fds, info_write.fileno()]
            words = [argv[0], "--info-fd", str(info_write.fileno()), *argv[1:]]
            for layer, inside in ((OUTER_FILTER, False), (INNER_FILTER, True)):
                if layer in words:  # before the command, which could hold the same word
                    place = words.index(layer)
                    fds.append(_readable(seccomp_filter(inside), ends))
                    words[place : place + 1] = ["--seccomp", str(fds[-1])]
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
                env={},
            )
            assert self.process.stdin is not None and self.process.stdout is not None
            self.stdin, self.stdout = self.process.stdin, self.process.stdout
            info_write.close()
            self._first = _open_first(info_read.fileno())

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

    def uses_more_than(self, limit_kb: int, held_kb: int = 0) -> bool:
        """Whether its processes and sockets together use more memory than that, shared pages counted once.

        `held_kb` is the memory in files, of which a part may be mapped.
        """
        pids = list(descendants(self.process.pid))
        limit_kb -= socket_bytes(pids[0]) >> 10 if pids else 0
        if sum(map(_resident_kb, pids)) + held_kb <= limit_kb:
            return False
        own, shared = (sum(column) for column in zip(*map(_proportional_kb, pids), strict=True)) if pids else (0, 0)
        return own + max(shared, held_kb) > limit_kb

    def held_files(self, tree: Path, tmp_bytes: int, file_bytes: int) -> HeldFiles:
        """What its processes hold in files that no folder of the tree shows."""
        return held_files(descendants(self.process.pid), tree, tmp_bytes, file_bytes)


def _readable(data: bytes, ends: contextlib.ExitStack) -> int:
    """A pipe that holds `data`, which is smaller than a pipe."""
    read, write = (ends.enter_context(os.fdopen(fd, mode, 0)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    write.write(data)
    write.close()
    return read.fileno()


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
    """Memory of a process with its page tables, which can be larger than what they map."""
    return _kb(Path(f"/proc/{pid}/status"), "VmRSS") + _page_tables_kb(pid)


def _page_tables_kb(pid: int) -> int:
    return _kb(Path(f"/proc/{pid}/status"), "VmPTE")


def _kb(file: Path, name: str) -> int:
    """A number of a file in /proc; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", file.read_text(errors="replace"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _proportional_kb(pid: int) -> tuple[int, int]:
    """Like `_resident_kb`, with shared pages divided among those who share: pages of its own, pages of memory files.

    Forks share almost everything, so the plain sum would count it many times.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    except OSError:
        return _resident_kb(pid), 0
    values = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss")}
    shared = values.get("Pss_Shmem", 0)
    return values.get("Pss", 0) - shared + _page_tables_kb(pid), shared
