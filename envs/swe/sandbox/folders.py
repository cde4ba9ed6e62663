"""The folder of this process, with the folders of its episodes. Those of processes that were killed are removed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "slime-verlog-files-"
_LOCK = "lock"
"""File that a process holds locked while it lives."""


class ProcessFolder:
    """A temporary folder that is removed when the process ends, or by the next process if this one is killed."""

    def __init__(self) -> None:
        _remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self.path.chmod(0o711)  # the sandbox's user must pass
        self._lock, name = tempfile.mkstemp(prefix=PREFIX)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(name, self.path / _LOCK)  # locked before others see it
        # Unlike `weakref.finalize`, this also runs when a process of multiprocessing ends.
        Finalize(None, remove_tree, (self.path,), exitpriority=0)

    def make(self) -> Path:
        """A new folder for an episode."""
        folder = Path(tempfile.mkdtemp(dir=self.path))
        folder.chmod(0o711)
        return folder


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
    if folder.exists():
        # Python's own rmtree recurses, and a tree made by an agent may be deeper than its stack.
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False, "env": environment}
        if os.geteuid() != 0:
            subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], **quiet)
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], **quiet)
