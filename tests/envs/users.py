"""Work that is done without root's rights, whoever runs the tests."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

USER = 12345


def open_way(folder: Path) -> None:
    """Let every user go to the folder, which is somewhere below the one for temporary files."""
    top = Path(tempfile.gettempdir()).resolve()
    for path in (folder, *folder.parents):
        if top in path.resolve().parents:
            path.chmod(0o755)


def as_a_user(folder: Path, work: Callable[[], None]) -> None:
    """Do the work in a forked process that owns the folder; another user may not be able to read
    this Python."""
    is_root = os.geteuid() == 0
    if is_root:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.chdir(folder)
            if is_root:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
