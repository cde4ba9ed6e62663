"""The agent's working tree, seen from outside, and the folder of this process with the trees of its
episodes.

Invariant: files are read and written without following a link out of the tree. Between commands no
process of the agent is alive (see `supervise`), so a path that was checked does not change.
"""

import contextlib
import fcntl
import functools
import os
import random
import stat
import subprocess
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from envs.errors import EnvironmentFault
from envs.swe.sandbox.groups import remove_left

TESTBED = "/testbed"
AGENT_ID = 60999
"""User and group of commands as they see them. Outside, if root trains, each tree belongs to a
separate user."""
_USERS = range(1_900_000_000, 2_000_000_000), range(30_000, 60_000)
"""Numbers of these users: of those that no distribution gives away, or else of the few that a
container may have."""
MAX_FILE_BYTES = 4 << 20
PREFIX = "slime-verlog-files-"
PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
"""Where `rm`, `cp`, `find` and others are searched."""
T = TypeVar("T")
_LOCK = "lock"
"""File that a process holds locked while it lives."""
_MAX_REMOVING = 16
"""Discarded folders that are removed in the background at once; `discard` waits for the removal of
further ones."""
_REMOVE = r"""
rm -rf -- "$1" || [ -L "$1" ] || { find -P "$1" -type d -execdir chmod u+rwx {} ";"; rm -rf -- "$1"; }
"""
"""Only a user other than root needs permissions, and only those of folders: a file may have links
elsewhere."""


class ProcessFolder:
    """A temporary folder that is removed when the process ends, or by the next process if this one
    is killed."""

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            # Left by a process that was killed. Others are in use, not complete yet, or another
            # user's.
            with contextlib.suppress(OSError), open(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_left(folder.name)
                remove_tree(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self.path.chmod(0o711)  # the sandbox's user must pass
        self._lock, name = tempfile.mkstemp(prefix=PREFIX)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(name, self.path / _LOCK)  # locked before others see it
        self._removing: list[subprocess.Popen[bytes]] = []
        # Unlike `weakref.finalize`, this also runs when a process of multiprocessing ends.
        Finalize(None, remove_tree, (self.path,), exitpriority=0)

    def make(self) -> Path:
        """A new folder for an episode."""
        folder = Path(tempfile.mkdtemp(dir=self.path))
        folder.chmod(0o711)
        return folder

    def discard(self, folder: Path) -> None:
        """Take one of the folders away at once, and remove it in the background, or at the end of
        the process."""
        aside = self.path / f"discarded-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # it is gone, or this machine cannot start a process now
            os.rename(folder, aside)
            self._removing = [process for process in self._removing if process.poll() is None]
            if len(self._removing) >= _MAX_REMOVING:
                remove_tree(aside)
            else:
                self._removing.append(_start("sh", "-c", _REMOVE, "sh", str(aside)))


def per_process(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` once in each process; a fork has neither its threads nor
    its locks."""
    made = functools.cache(lambda process: make())
    making = threading.Lock()

    def made_here() -> T:
        with making:
            return made(os.getpid())

    return made_here


process_folder = per_process(ProcessFolder)
"""Returns the folder of this process."""


def remove_tree(folder: Path) -> None:
    """Remove a tree, however deep it is and whatever its permissions are; a missing one is fine."""
    with contextlib.suppress(OSError):
        # This machine cannot start a process now; the next process removes the folder.
        _start("sh", "-c", _REMOVE, "sh", str(folder)).wait()


def run_program(*argv: str) -> None:
    """Run a program without our variables; raises EnvironmentFault, with its last line, if it
    fails."""
    with tempfile.TemporaryFile() as said:
        if _start(*argv, stderr=said).wait():
            said.seek(max(0, said.seek(0, os.SEEK_END) - 1000))
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise EnvironmentFault(
                f"{argv[0]} failed: {lines[-1] if lines else 'it printed nothing'}"
            )


def _start(*argv: str, stderr: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    env = {"PATH": PROGRAMS, "LC_ALL": "C"}
    null = subprocess.DEVNULL
    # In a new session, so that Ctrl-C in the terminal does not interrupt it.
    return subprocess.Popen(
        argv, env=env, stdin=null, stdout=null, stderr=stderr, start_new_session=True
    )


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file of untrusted code without blocking; None for another kind. Raises OSError
    as `os.open`."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def read_plain(path: Path, most: int) -> bytes | None:
    """Read at most `most` bytes of a file; as `open_plain`."""
    descriptor = open_plain(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


class ToolFailure(Exception):
    """What the agent asked for cannot be done; the text tells it why. It is data, not a fault."""


class Workspace:
    """A copy of a pristine tree, or what a function makes; `close`, or the next process, removes
    it."""

    def __init__(self, source: Path | Callable[[Path], None]) -> None:
        owner = process_folder()
        self.folder = owner.make()
        self.tree = self.folder / "tree"
        self._finalizer = weakref.finalize(self, owner.discard, self.folder)
        if isinstance(source, Path):
            copy_tree(source, self.tree)
        else:
            source(self.tree)

    def close(self) -> None:
        """Take the tree away and remove it in the background; a second call does nothing."""
        self._finalizer()

    def locate(self, path: str) -> Path:
        """The real place of a path below /testbed; raises ToolFailure outside of it, also by way of
        links."""
        if len(path) > 4000:
            raise ToolFailure("the path is longer than any path can be")
        relative = PurePosixPath(path)
        if relative.is_absolute():
            if not relative.is_relative_to(TESTBED):
                raise ToolFailure(f"{path} is outside of the repository ({TESTBED})")
            relative = relative.relative_to(TESTBED)
        try:
            root = os.path.realpath(self.tree)
            real = os.path.realpath(os.path.join(root, relative))
        except (OSError, ValueError) as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error
        if real != root and not real.startswith(root + os.sep):
            raise ToolFailure(f"{path} leads outside of the repository ({TESTBED})")
        return Path(real)

    def entries(self, path: str) -> list[str]:
        """Names in a folder, sorted, folders with a slash; `.git` is left out."""
        try:
            with os.scandir(self.locate(path)) as folder:
                names = [e.name + ("/" if e.is_dir(follow_symlinks=False) else "") for e in folder]
        except OSError as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error
        return sorted(name for name in names if name != ".git/")

    def read(self, path: str) -> str:
        """Read a text file; raises ToolFailure if it is missing, too long, not plain or not
        text."""
        try:
            data = read_plain(self.locate(path), MAX_FILE_BYTES + 1)
            if data is None:
                raise ToolFailure(f"{path} is not a plain file")
            if len(data) > MAX_FILE_BYTES:
                raise ToolFailure(
                    f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB; use run with sed or head"
                )
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolFailure(f"{path} is not UTF-8 text; use run to look into it") from error
        except OSError as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error

    def write(self, path: str, text: str) -> None:
        """Write a text file and the folders on its way; raises ToolFailure where the agent may
        not."""
        data = text.encode("utf-8")
        if len(data) > MAX_FILE_BYTES:
            raise ToolFailure(f"the text is longer than {MAX_FILE_BYTES >> 20} MiB")
        target = self.locate(path)
        try:
            folders = (target.parent, *target.parent.parents)
            for folder in reversed(
                [f for f in folders if f.is_relative_to(self.tree) and not f.exists()]
            ):
                folder.mkdir()
                give(folder, self.tree)
            descriptor = open_plain(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            if descriptor is None:
                raise ToolFailure(f"{path} is not a plain file")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                give(file.fileno(), self.tree)
        except OSError as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or "not a usable path"


def new_user() -> int:
    """Draw the number of a user that no other sandbox has; what the kernel grants per user is then
    not shared.

    Without root, all sandboxes run as our user.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for numbers in _USERS:
        if any(
            int(first) <= numbers.start and numbers.stop <= int(first) + int(size)
            for first, _, size in mapped
        ):
            return random.SystemRandom().choice(numbers)
    raise EnvironmentFault(
        "the trainer is root in a container that maps fewer than 60000 users; run it as another "
        "user"
    )


def user_of(tree: Path) -> int:
    """The user of a tree that was handed over; for another tree, a new one."""
    owner = tree.lstat().st_uid
    return owner if any(owner in numbers for numbers in _USERS) else new_user()


def give(target: int | Path, tree: Path) -> None:
    """Hand a file or folder to the user that a tree belongs to."""
    if os.geteuid() == 0:
        owner = tree.lstat()
        os.chown(target, owner.st_uid, owner.st_gid)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a trusted tree with its times and links, and hand the copy to a separate user."""
    copy_files(source, target)
    hand_over(target)


def copy_files(source: Path, target: Path) -> None:
    """Copy a trusted file or folder to `target`, or into that folder's contents, as `cp -a`
    does."""
    run_program(
        "cp", "-a", "-T", "--remove-destination", "--reflink=auto", "--", str(source), str(target)
    )


def hand_over(tree: Path, user: int | None = None) -> None:
    """Give a whole tree to a user that the sandbox runs as; without root we are that user."""
    if os.geteuid() == 0:
        number = user_of(tree) if user is None else user
        run_program("chown", "-R", "-h", f"{number}:{number}", "--", str(tree))
