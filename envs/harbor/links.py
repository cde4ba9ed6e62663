"""Finds links of the agent that lead to the tests, which exist only later: an answer would be compared with itself."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from envs.harbor.places import TESTS, VERDICT, VERIFIER_HOME, outside
from envs.harbor.task import HarborTask
from envs.swe.sandbox.folders import walk

_MAX_LINKS = 40
"""As many as Linux follows."""


def find_link_to_tests(tree: Path, task: HarborTask) -> str:
    """A sentence about a link of the agent that leads to files of the tests, or to a folder above them."""
    for place in task.places:
        for path in _links(tree / place.part):
            inside = PurePosixPath(place.path, os.path.relpath(path, tree / place.part))
            try:
                target = _resolved(inside, tree, task)
            except OSError as error:
                return f"{inside} cannot be checked ({error.strerror})"
            places = map(PurePosixPath, (TESTS, VERDICT, VERIFIER_HOME, "/proc"))
            if any(target.is_relative_to(other) or other.is_relative_to(target) for other in places):
                return f"{inside} is a link to {target}"
    return ""


def _links(folder: Path) -> list[str]:
    """The links in a folder, however deep; what cannot be listed counts as one."""
    unlisted: list[str] = []
    return [entry.path for entry in walk(folder, unlisted=unlisted.append) if entry.is_symlink()] + unlisted


def _resolved(path: PurePosixPath, tree: Path, task: HarborTask) -> PurePosixPath:
    """Where a path leads inside the sandbox; / if links lead on and on.

    Raises:
        OSError: the kernel does not look at a path on the way, for example because it is too long.
    """
    current, waiting, followed = PurePosixPath("/"), list(reversed(path.parts[1:])), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            current = current.parent
            continue
        file = outside(tree, task.places, str(current / part))
        file = file or (task.root or Path("/")) / str(current / part).lstrip("/")
        if not _is_link(file):
            current /= part
            continue
        followed += 1
        if followed > _MAX_LINKS:
            return PurePosixPath("/")
        target = PurePosixPath(os.readlink(file))
        current = PurePosixPath("/") if target.is_absolute() else current
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return current


def _is_link(file: Path) -> bool:
    """As `Path.is_symlink`, which hides some errors in some versions of Python."""
    try:
        return stat.S_ISLNK(os.lstat(file).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
