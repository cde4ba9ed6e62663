"""The folder of this process, with the folders of its episodes. Those of processes that were killed are removed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from pathlib import Path

from envs.swe.sandbox.workspace import remove_tree

PREFIX = "slime-verlog-agents-"
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
        weakref.finalize(self, remove_tree, self.path)

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
