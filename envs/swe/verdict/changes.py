"""Reads the agent's changes from its tree as plain bytes, and decides which of them count.

Links, pipes, devices, caches and git data are left out, and no program runs on the tree outside the sandbox.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.swe.instances import Instance

MAX_FILES = 2000
MAX_BYTES = 32 << 20

_CONFIGURATION = frozenset(
    (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
        ".coveragerc",
    )
)
_NEVER_FOLDERS = frozenset((".git", "__pycache__", ".pytest_cache", ".hypothesis"))
_NEVER_ENDINGS = (".pyc", ".pyo", ".pth", ".egg-link")
_TEST_NAME = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py")


class TooMuchChanged(Exception):
    """The agent's changes are more than any patch would be."""


@dataclass(frozen=True)
class Change:
    """New content of one file; None where it was deleted."""

    content: bytes | None
    executable: bool = False


def collect_changes(tree: Path, pristine: Path) -> Mapping[str, Change]:
    """Files that differ between the agent's tree and the pristine one, by relative path.

    A file of the same size and time as the pristine one counts as unchanged.

    Raises:
        TooMuchChanged: past `MAX_FILES` files or `MAX_BYTES` bytes.
    """
    changes: dict[str, Change] = {}
    before, after = dict(_plain_files(pristine)), dict(_plain_files(tree))
    room = MAX_BYTES
    for path, status in after.items():
        old = before.get(path)
        if old and (old.st_size, old.st_mtime_ns, old.st_mode) == (status.st_size, status.st_mtime_ns, status.st_mode):
            continue
        room -= status.st_size
        if room < 0 or len(changes) >= MAX_FILES:
            raise TooMuchChanged(f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB were changed")
        change = _read_change(tree / path, status)
        if old is None or change.content is None or change != _read_change(pristine / path, old):
            changes[path] = change
    for path in before.keys() - after.keys():
        changes[path] = Change(None)
    return changes


def _read_change(path: Path, status: os.stat_result) -> Change:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return Change(None)
    with os.fdopen(descriptor, "rb") as file:
        return Change(file.read(status.st_size), bool(status.st_mode & stat.S_IXUSR))


def _plain_files(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below `tree` that could belong to a patch; links are not followed."""
    waiting, seen = [""], 0
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(os.path.join(tree, folder)))
        except OSError:
            # Closed to us, or too deep to name: nothing that a patch could hold.
            continue
        for entry in entries:
            seen += 1
            if seen > 100 * MAX_FILES:
                raise TooMuchChanged(f"the repository holds more than {100 * MAX_FILES} files")
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _NEVER_FOLDERS:
                    waiting.append(path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_NEVER_ENDINGS):
                yield path, entry.stat(follow_symlinks=False)


@functools.lru_cache(maxsize=256)
def patched_files(patch: str) -> frozenset[str]:
    """Paths that a unified diff touches."""
    return frozenset(
        name.split("\t")[0].strip() for name in re.findall(r"^(?:\+\+\+ b|--- a)/(.*)$", patch, flags=re.MULTILINE)
    )


def is_protected(path: str, instance: Instance) -> bool:
    """Whether a file is judged as we have it, whatever the agent did to it: tests and what configures them.

    A file below a folder of tests counts as a test, unless the reference solution itself changes it.
    """
    pure = PurePosixPath(path)
    ours = _test_files(instance)
    # A folder in the place of such a file would remove it as well.
    if any(p.name in _CONFIGURATION or str(p) in ours for p in (pure, *pure.parents)):
        return True
    if path in patched_files(instance.patch):
        return False
    in_tests = any(part in ("test", "tests") for part in pure.parts)
    return in_tests or _TEST_NAME.fullmatch(pure.name) is not None


@functools.lru_cache(maxsize=16)
def _test_files(instance: Instance) -> frozenset[str]:
    return patched_files(instance.test_patch) | {test.split("::", 1)[0] for test in instance.required}


def apply_changes(tree: Path, changes: Mapping[str, Change]) -> None:
    """Put changes into a tree of ours. Links in the way are removed, never followed."""
    for path, change in sorted(changes.items()):
        target = tree
        for part in PurePosixPath(path).parts[:-1]:
            target = target / part
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            if change.content is not None:
                target.mkdir(exist_ok=True)
        target = tree / path
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.is_dir() and change.content is not None:
            shutil.rmtree(target)
        if change.content is not None:
            target.write_bytes(change.content)
            target.chmod(0o755 if change.executable else 0o644)
