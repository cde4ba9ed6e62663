"""File trees of images: paths inside, and what a build step changes.

A tree that is finished is never changed. The next one is a copy of its folders with hard links to its files, in which
changed files are replaced, so a file takes its space once.
"""

import os
import stat
from pathlib import Path, PurePosixPath

from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import follow
from envs.swe.sandbox.workspace import give_to_agent, remove_tree

_OPAQUE = "user.overlay.opaque"


def inside(tree: Path, path: str) -> Path:
    """Find a path of an image, following links as the image's programs do; raises UnsupportedLine for a circle."""
    found = follow(PurePosixPath("/", path), lambda inner: tree / str(inner).lstrip("/"))
    if found is None:
        raise UnsupportedLine(f"{path} leads through too many links")
    return tree / str(found).lstrip("/")


def make_folder(folder: Path) -> None:
    """Make a folder of a tree, and those on its way; raises UnsupportedLine if there is a file in its place."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o755)
        give_to_agent(path)
    if not folder.is_dir():
        raise UnsupportedLine(f"{folder} is a file, and a folder is needed there")


def put(item: Path, target: Path) -> None:
    """Move a file or link into a tree, in place of what is there."""
    _remove(target)
    os.rename(item, target)


def apply_changes(changes: Path, tree: Path) -> None:
    """Move the upper layer of an overlay, or copied files, into a tree. Files that the layer deletes are removed."""
    with os.scandir(changes) as entries:
        for entry in entries:
            target, status = tree / entry.name, entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False):
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # how an overlay writes down a deletion
                    _remove(target)
                else:
                    put(Path(entry.path), target)
                continue
            # The folder of an upper layer that is opaque replaces the one below it.
            opaque = _OPAQUE in os.listxattr(entry.path) and os.getxattr(entry.path, _OPAQUE) == b"y"
            if opaque or target.is_symlink() or not target.is_dir():
                _remove(target)
                target.mkdir()
            apply_changes(Path(entry.path), target)
            give_to_agent(target)
            target.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
