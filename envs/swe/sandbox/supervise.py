"""Runs one sandboxed command to its end or to its first broken limit, and returns only what fits in
memory.

Invariant: when `supervise` returns, no process of the sandbox is alive, so nothing else changes its
files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from envs.errors import EnvironmentFault
from envs.swe.sandbox import groups
from envs.swe.sandbox.usage import UNMEASURABLE
from envs.swe.sandbox.workspace import process_folder

_TICK_S = 0.05
_READ = 1 << 16
_REPORT_BYTES = 4 << 20
_END_S = 30.0
_CORES = 4
FILTERS = "@filters"
"""Word of a command line that stands for bwrap's options with the seccomp filters."""
_OWN_PROCESSES = 5
"""Processes of the sandbox itself, which its group counts as well."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What one sandboxed command may use; memory is that of all its processes together, and of each
    one.

    All its processes together may use CPU time for four cores that are busy for `seconds`.
    """

    seconds: float = 60.0
    memory_mb: int = 2048
    address_mb: int | None = None
    """Address space of each process; null for `memory_mb`. Node.js, for one, reserves far more than
    it uses."""
    processes: int = 128
    file_mb: int = 64
    tree_mb: int = 512
    tmp_mb: int = 256
    files: int = 1024
    """Files that each process may have open."""
    output_mb: int = 16
    """Output past this stops the command; of the rest, `keep_bytes` at either end are kept."""
    keep_bytes: int = 16384

    def restrict(self, process: int) -> None:
        """Set the limits that each process has, on one that has no children yet, to at most those
        of our own."""
        wanted = {
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_AS: (self.address_mb or self.memory_mb) << 20,
            resource.RLIMIT_FSIZE: self.file_mb << 20,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: self.files,
        }
        for kind, most in wanted.items():
            own = resource.getrlimit(kind)[1]
            most = most if own == resource.RLIM_INFINITY else min(most, own)
            resource.prlimit(process, kind, (most, most))


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `stopped` is empty, or the limit that ended it: time, memory, disk,
    output; or `stop`."""

    returncode: int
    output: str
    report: bytes = b""
    stopped: str = ""


class KeptOutput:
    """Keeps the first and the last `keep` bytes of a stream."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.total = 0
        self.head = bytearray()
        self.tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.keep - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room < len(data) else b""
        if len(self.tail) > 4 * self.keep:
            del self.tail[: -self.keep]

    def text(self) -> str:
        tail = bytes(self.tail[-self.keep :])
        lost = self.total - len(self.head) - len(tail)
        note = f"\n[... {lost} bytes left out ...]\n".encode() if lost else b""
        return (bytes(self.head) + note + tail).decode("utf-8", "replace")


def supervise(
    argv: Sequence[str],
    filters: Sequence[bytes],
    limits: Limits,
    size_of: Callable[[], int],
    stdin: bytes = b"",
    with_report: bool = False,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run `argv` (a bwrap command line whose pid namespace is its own) under `limits`.

    `filters` are seccomp programs, loaded in this order where `argv` holds the word `FILTERS`.
    `size_of` returns the bytes on disk that count against `tree_mb`. With `with_report`, an extra
    pipe is passed on; its number is the first line that the command reads from stdin, and what is
    written to it comes back as `report`. `stdin` is a pipe too: what was read is gone, so that a
    later process cannot read it again. When `stop` is set, the command is ended.
    """
    # What was too big before may be made smaller, but not bigger.
    before = size_of()
    tree_limit = max(limits.tree_mb << 20, before if before < UNMEASURABLE else 0)
    with contextlib.ExitStack() as ends:
        report, far_end = _pipe(ends) if with_report else (None, None)
        namespace = Namespace(argv, filters, limits, [far_end.fileno()] if far_end else [])
        if far_end:
            stdin = b"%d\n" % far_end.fileno() + stdin
            far_end.close()
        run = _Run(namespace, limits, size_of, tree_limit, stdin, report.fileno() if report else -1)
        try:
            stopped = run.loop(stop)
            stopped = stopped or namespace.broken(limits)
        finally:
            namespace.end()
            run.finish()
    # What was written between the last look and the end counts as well.
    stopped = stopped or ("disk" if size_of() > tree_limit else "")
    return Outcome(namespace.process.returncode, run.output.text(), bytes(run.report), stopped)


class _Run:
    """The streams of one running command, and the watch over what it uses."""

    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        size_of: Callable[[], int],
        tree_limit: int,
        stdin: bytes,
        report_fd: int,
    ) -> None:
        self.namespace = namespace
        self.process = namespace.process
        self.limits = limits
        self.size_of = size_of
        self.tree_limit = tree_limit
        self.output = KeptOutput(limits.keep_bytes)
        self.report = bytearray()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.writer = threading.Thread(target=_write, args=(self.process.stdin, stdin), daemon=True)
        self.writer.start()
        self.stdout = self.process.stdout
        self.report_fd = report_fd
        self.selector = selectors.DefaultSelector()
        self.ended_fd = os.pidfd_open(self.process.pid)
        self.selector.register(self.ended_fd, selectors.EVENT_READ)
        for fd in (self.stdout.fileno(), *([report_fd] if report_fd >= 0 else [])):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)
        self.files_check_at = 0.0

    def loop(self, stop: threading.Event | None) -> str:
        """Serve the streams until the process ends; return the limit that was broken, or `stop`, if
        any."""
        deadline = time.monotonic() + self.limits.seconds
        check_at = time.monotonic() + _TICK_S
        while self.process.poll() is None:
            for key, _ in self.selector.select(_TICK_S):
                if key.fd != self.ended_fd:
                    self._read(key.fd)
            now = time.monotonic()
            if now > deadline:
                return "time"
            if stop is not None and stop.is_set():
                return "stop"
            if self.output.total > self.limits.output_mb << 20 or len(self.report) > _REPORT_BYTES:
                return "output"
            if now >= check_at:
                check_at = now + _TICK_S
                if broken := self._over_use(now):
                    return broken
        return ""

    def _read(self, fd: int) -> bool:
        """Take what is there; False when there is no more for now or for good."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            return False
        if fd == self.report_fd:
            self.report += data
        else:
            self.output.add(data)
        return True

    def _over_use(self, now: float) -> str:
        if broken := self.namespace.broken(self.limits):
            return broken
        if now < self.files_check_at:
            return ""
        too_big = self.size_of() > self.tree_limit
        # Large trees take long to add up; a twentieth of the time is what the watch may cost.
        self.files_check_at = now + max(0.25, 20 * (time.monotonic() - now))
        return "disk" if too_big else ""

    def finish(self) -> None:
        """Read what the dead processes left in the pipes, and close them."""
        for fd in {key.fd for key in self.selector.get_map().values()} - {self.ended_fd}:
            while self._read(fd):
                pass
        self.selector.close()
        os.close(self.ended_fd)
        self.stdout.close()
        self.writer.join()


def _write(stdin: IO[bytes], data: bytes) -> None:
    """Write all of a command's input. If the command leaves it unread, this ends with the
    command."""
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(data)


class Namespace:
    """One bwrap process, its control group, and the namespace that it made. `end` must be called.

    bwrap returns when its command has ended, while the rest of its namespace may still be dying. So
    the namespace's first process is watched: the kernel removes it after all others.
    """

    def __init__(
        self, argv: Sequence[str], filters: Sequence[bytes], limits: Limits, pass_fds: Sequence[int]
    ) -> None:
        name = f"{process_folder().path.name}-{next(_numbers)}"
        self.group = groups.make_group(
            name, limits.memory_mb << 20, limits.processes + _OWN_PROCESSES
        )
        with contextlib.ExitStack() as ends:
            info_read, info_write = _pipe(ends)
            # bwrap waits for the end of this pipe before it starts anything, so all processes are
            # limited.
            wait_read, _ = _pipe(ends)
            fds = [*pass_fds, info_write.fileno(), wait_read.fileno()]
            options = ["--info-fd", str(info_write.fileno()), "--block-fd", str(wait_read.fileno())]
            words = [argv[0], *options, *argv[1:]]
            programs = [ends.enter_context(_memory_file(program)).fileno() for program in filters]
            place = words.index(FILTERS)  # before the command, which could hold the same word
            words[place : place + 1] = [w for fd in programs for w in ("--add-seccomp-fd", str(fd))]
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[*fds, *programs],
                start_new_session=True,
                env={},
            )
            info_write.close()
            self._first: int | None = None
            first = _find_first(info_read.fileno())
            if first is not None:
                self._limit(first, limits)

    def _limit(self, first: int, limits: Limits) -> None:
        try:
            self._first = os.pidfd_open(first)
            limits.restrict(first)
            if self.group:
                self.group.take(first)
        except ProcessLookupError:  # it has ended: bwrap cannot build the sandbox, and says why
            return
        except OSError as error:
            self.end()
            raise EnvironmentFault(
                f"a sandbox (bwrap, pid {self.process.pid}) cannot be limited: {error}"
            ) from error

    def broken(self, limits: Limits) -> str:
        """The limit of the control group that was broken, if any."""
        return (
            self.group.broken(limits.memory_mb << 20, _CORES * limits.seconds) if self.group else ""
        )

    def end(self) -> None:
        """Kill what still runs, and return when nothing is alive; raises EnvironmentFault if that
        fails."""
        if self.group:
            self.group.kill()
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
        if self.group:
            self.group.remove()


def _memory_file(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("filter"), "r+b", 0)
    file.write(content)
    file.seek(0)
    return file


def _pipe(ends: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return ends.enter_context(os.fdopen(read, "rb", 0)), ends.enter_context(
        os.fdopen(write, "wb", 0)
    )


def _find_first(info_fd: int) -> int | None:
    """The namespace's first process, from what bwrap tells; None if bwrap made no namespace."""
    told = b""
    deadline = time.monotonic() + _END_S
    while b"}" not in told:
        ready, _, _ = select.select([info_fd], [], [], max(deadline - time.monotonic(), 0))
        data = os.read(info_fd, 4096) if ready else b""
        if not data:
            return None
        told += data
    return json.loads(told)["child-pid"]
