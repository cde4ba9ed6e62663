"""The folder of this process, with the folders of its episodes. Those of processes that were killed are removed."""

from __future__ import annotations

import fcntl
import os
import queue
import stat
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "slime-verlog-files-"
_LOCK = "lock"
"""File that a process holds locked while it lives."""
_MAX_WAITING = 16
"""Discarded folders that wait for their removal. With more, `discard` removes the next one itself, so the disk does not
fill."""


class ProcessFolder:
    """A temporary folder that is removed when the process ends, or by the next process if this one is killed."""

    def __init__(self) -> None:
        _remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self.path.chmod(0o711)  # the sandbox's user must pass
        self._lock, name = tempfile.mkstemp(prefix=PREFIX)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(name, self.path / _LOCK)  # locked before others see it
        self._pid, self._ended = os.getpid(), threading.Event()
        # The garbage collector may call `discard` inside of `discard`, so both must be reentrant.
        self._starting = threading.RLock()
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._remover: threading.Thread | None = None
        # Unlike `weakref.finalize`, this also runs when a process of multiprocessing ends.
        Finalize(None, self._end, exitpriority=0)

    def make(self) -> Path:
        """A new folder for an episode."""
        folder = Path(tempfile.mkdtemp(dir=self.path))
        folder.chmod(0o711)
        return folder

    def discard(self, folder: Path) -> None:
        """Take one of the folders away at once, and remove it in the background, or at the end of the process."""
        aside = self.path / f"discarded-{uuid.uuid4().hex}"
        try:
            os.rename(folder, aside)
        except FileNotFoundError:
            return
        # Threads do not survive a fork.
        if os.getpid() != self._pid or self._ended.is_set() or self._waiting.qsize() >= _MAX_WAITING:
            remove_tree(aside)
            return
        with self._starting:
            if self._remover is None:
                self._remover = threading.Thread(target=self._remove, name="discarded folders", daemon=True)
                self._remover.start()
        self._waiting.put(aside)

    def _remove(self) -> None:
        while (folder := self._waiting.get()) is not None and not self._ended.is_set():
            remove_tree(folder)

    def _end(self) -> None:
        self._ended.set()
        self._waiting.put(None)
        if self._remover is not None and os.getpid() == self._pid:
            self._remover.join()
        remove_tree(self.path)


def _remove_stale() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with open(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
        except OSError:  # in use, not complete yet, or another user's
            continue


_making = threading.Lock()
_folders: dict[int, ProcessFolder] = {}


def process_folder() -> ProcessFolder:
    """The folder of this process, made at the first call; a forked process has another."""
    with _making:
        if os.getpid() not in _folders:
            _folders[os.getpid()] = ProcessFolder()
        return _folders[os.getpid()]


def remove_tree(folder: Path) -> None:
    """Remove a tree, however deep it is and whatever its permissions are; a missing one is fine."""
    remove = ["rm", "-rf", "--", str(folder)]
    # Only a user other than root needs permissions; chmod follows no link below the folder.
    if run_program(*remove, check=False) and not folder.is_symlink():
        run_program("chmod", "-R", "u+rwx", "--", str(folder), check=False)
        run_program(*remove, check=False)


def run_program(*argv: str, check: bool = True) -> int:
    """Run a program of this machine without our environment variables; return its exit status."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    return subprocess.run(argv, env=env, capture_output=True, check=check).returncode


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file that untrusted code may have made; None for anything else, which is not waited for.

    Raises:
        OSError: it is missing or a link, or the system refuses.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def walk(
    top: Path, skipped: Collection[str] = (), unlisted: Callable[[str], object] = lambda folder: None
) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder, however deep; links are not followed.

    Args:
        skipped: names of folders to leave out.
        unlisted: is told of each folder that cannot be listed: closed to us, or with a path that is too long.
    """
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry
                    elif entry.name not in skipped:
                        waiting.append(entry.path)
                        yield entry
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:
            unlisted(folder)
