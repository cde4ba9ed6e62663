"""The agent's working tree, seen from outside: files are read and written without following a link out of it.

Between commands no process of the agent is alive (see `supervise`), so a path that was checked does not change.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from envs.swe.sandbox.folders import open_plain, process_folder, run_program
from envs.swe.sandbox.sandbox import AGENT_ID, TESTBED

MAX_FILE_BYTES = 4 << 20


class ToolFailure(Exception):
    """What the agent asked for cannot be done; the text tells it why. It is data, not a fault."""


class Workspace:
    """A tree that the agent may change: a copy of a pristine one, or what a function makes; `close` removes it.

    If the process is killed first, the next one that makes a workspace removes it.
    """

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
        """The real place of `path`, relative or below /testbed.

        Raises:
            ToolFailure: it lies outside the repository, also by way of links.
        """
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
        """Content of a text file.

        Raises:
            ToolFailure: missing, not a plain file, too long, or not text.
        """
        try:
            with _open(path, self.locate(path), "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise ToolFailure(f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB; use run with sed or head")
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolFailure(f"{path} is not UTF-8 text; use run to look into it") from error
        except OSError as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error

    def write(self, path: str, text: str) -> None:
        """Write a whole text file, making the folders on its way.

        Raises:
            ToolFailure: outside the repository, not a plain file, too long, or the system refuses.
        """
        data = text.encode("utf-8")
        if len(data) > MAX_FILE_BYTES:
            raise ToolFailure(f"the text is longer than {MAX_FILE_BYTES >> 20} MiB")
        target = self.locate(path)
        try:
            folders = (target.parent, *target.parent.parents)
            for folder in reversed([f for f in folders if f.is_relative_to(self.tree) and not f.exists()]):
                folder.mkdir()
                give_to_agent(folder)
            with _open(path, target, "wb") as file:
                file.write(data)
                give_to_agent(file.fileno())
        except OSError as error:
            raise ToolFailure(f"{path}: {_reason(error)}") from error


def _open(name: str, real: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    descriptor = open_plain(real, os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if descriptor is None:
        raise ToolFailure(f"{name} is not a plain file")
    return os.fdopen(descriptor, mode)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or "not a usable path"


def give_to_agent(target: int | Path) -> None:
    """Hand a file or folder to the user that the sandbox runs as."""
    if os.geteuid() == 0:
        os.chown(target, AGENT_ID, AGENT_ID)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a trusted tree with its times and links, and hand the copy to the agent's user."""
    copy_files(source, target)
    hand_over(target)


def copy_files(source: Path, target: Path) -> None:
    """Copy a trusted file or folder to `target`, or into that folder's contents, as `cp -a` does."""
    run_program("cp", "-a", "-T", "--remove-destination", "--reflink=auto", "--", str(source), str(target))


def hand_over(tree: Path) -> None:
    """Give a whole tree to the user that the sandbox runs as; without root we are that user."""
    if os.geteuid() == 0:
        run_program("chown", "-R", "-h", f"{AGENT_ID}:{AGENT_ID}", "--", str(tree))
