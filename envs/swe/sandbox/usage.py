"""Measures a tree of files, which may be hostile, and walks through it."""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

UNMEASURABLE = 1 << 62
"""Size of a tree that hides something from being measured: closed folders, or paths too long to
name."""

_ENTRY_BYTES = 4096
"""What a file costs at least: its inode, its name in the folder, and the kernel's memory of
both."""


def tree_bytes(tree: Path, may_hide: bool = False) -> int:
    """Disk space of the files under `tree`, links not followed; every entry counts for 4 KiB at
    least.

    With `may_hide`, what cannot be listed does not count; else it makes the tree unmeasurable.
    """
    total = 0
    unlisted = list[str]()
    for entry in walk(tree, unlisted=unlisted.append):
        try:
            total += max(512 * entry.stat(follow_symlinks=False).st_blocks, _ENTRY_BYTES)
        except FileNotFoundError:  # removed while we looked
            continue
        except OSError:
            return UNMEASURABLE
    return UNMEASURABLE if unlisted and not may_hide else total


def walk(
    top: Path,
    skipped: Collection[str] = (),
    unlisted: Callable[[str], object] = lambda folder: None,
) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder, however deep; links are not followed.

    Args:
        skipped: names of folders to leave out.
        unlisted: is told of each folder that cannot be listed: closed to us, or with a path that is
            too long.
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
