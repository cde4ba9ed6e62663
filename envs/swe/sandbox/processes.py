"""The processes of a running sandbox, which are started and ended together.

bwrap returns when its command has ended, while the rest of its process namespace may still be dying. So the
namespace's first process is watched: the kernel removes it after all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from envs.errors import EnvironmentFault
from envs.swe.sandbox.seccomp import seccomp_filter

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
