"""The places, which are the folders that an agent may change: which they are, and how an episode's
copy is made.

Each is a folder of the tree of an episode, mounted at its path. Links in them are followed only
inside the sandbox; here, only paths without a link on the way are written to.
"""

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from envs.harbor.dockerfile import Image, UnsupportedLine
from envs.swe.sandbox.usage import walk
from envs.swe.sandbox.workspace import copy_files, hand_over

TESTS = "/tests"
VERDICT = "/logs/verifier"
VERIFIER_HOME = "/verifier"
SOLUTION = "/solution"
_ALWAYS = ("/tmp", "/logs/agent", "/logs/artifacts", SOLUTION)
_OURS = frozenset(("dev", "logs", "proc", "sys", "tests", "verifier"))
_SYSTEM = _OURS | {
    "bin",
    "boot",
    "etc",
    "image",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "run",
    "sbin",
    "usr",
}
IMAGE_SYSTEM = _SYSTEM | {"media", "mnt", "opt", "srv", "var"}
"""Folders of an image that are not copied for each episode, unless the task works there."""


def part_of(place: str) -> str:
    """Name of a place's folder in an episode's tree."""
    return place.strip("/").replace("/", "%")


def is_in(path: str, places: Iterable[str]) -> bool:
    """Whether a path of the sandbox is in one of the places."""
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def is_direct(top: Path, path: str) -> bool:
    """Whether no link is on the way from `top` to `path` inside it, nor at its end."""
    inside = path.lstrip("/")
    return Path(os.path.realpath(top / inside)) == Path(os.path.realpath(top)) / inside


_MAX_LINKS = 40
"""As many as Linux follows."""
_CHECK_S = 30.0
"""Seconds after which links are too many, or too long, to check."""


class UncheckableError(Exception):
    """The agent left something that cannot be checked in reasonable time."""


def follow(
    link: PurePosixPath,
    file_of: Callable[[PurePosixPath], Path],
    may_pass: Callable[[PurePosixPath], bool],
) -> PurePosixPath | None:
    """Find where a link of a sandbox leads, as programs in it follow links; no link is on the way
    to its folder.

    `file_of` maps a path without links in its folders to this machine. The result is None for a
    circle, and where the way leads through a place that it may not pass. Raises OSError if the
    kernel rejects a path on the way, for example because it is too long.
    """
    current = link.parent
    waiting = [link.name]
    followed = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            current = current.parent
            continue
        if not may_pass(current / part):
            return None
        file = file_of(current / part)
        try:  # `Path.is_symlink` hides some errors in some versions of Python
            is_link = stat.S_ISLNK(os.lstat(file).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_link = False
        if not is_link:
            current /= part
            continue
        followed += 1
        if followed > _MAX_LINKS:
            return None
        target = PurePosixPath(os.readlink(file))
        current = PurePosixPath("/") if target.is_absolute() else current
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return current


def drop_what_leads_out(tree: Path, places: Sequence[str], root: Path | None) -> None:
    """Remove what the agent left that is not a file, folder or link, and links out of its places
    and of the system.

    Raises UncheckableError for a path that is too long, and for links that take too long to check.
    """
    deadline = time.monotonic() + _CHECK_S
    system = [
        f"/{name}"
        for name in (_SYSTEM if root is None else IMAGE_SYSTEM) - _OURS - {"boot", "image", "run"}
    ]
    allowed = [PurePosixPath(folder) for folder in (*places, *system)]

    def may_pass(path: PurePosixPath) -> bool:
        if time.monotonic() > deadline:
            raise UncheckableError("the agent left links that take too long to check")
        return any(path.is_relative_to(folder) or folder.is_relative_to(path) for folder in allowed)

    def file_of(path: PurePosixPath) -> Path:
        return outside(tree, places, str(path)) or (root or Path("/")) / str(path).lstrip("/")

    for place in places:
        folder = tree / part_of(place)
        unlisted = list[str]()
        for entry in list(walk(folder, unlisted=unlisted.append)):
            if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                continue
            inside = PurePosixPath(place, os.path.relpath(entry.path, folder))
            try:
                target = follow(inside, file_of, may_pass) if entry.is_symlink() else None
                if target is None or not is_in(str(target), [str(folder) for folder in allowed]):
                    os.unlink(entry.path)
            except OSError as error:
                raise UncheckableError(f"{inside} cannot be checked ({error.strerror})") from error
        if unlisted:
            raise UncheckableError(f"{place} holds folders that cannot be listed")


def home_of(user: str, root: Path | None) -> str:
    """The agent's home. On this machine it is not /root, because a Python may be installed
    there."""
    is_root = user in ("root", "0")
    return ("/root" if root is not None else "/home/agent") if is_root else f"/home/{user}"


def find_places(image: Image, root: Path | None) -> tuple[str, ...]:
    """The folders that the agent may change, none inside another; raises UnsupportedLine if one is
    the system's.

    With the files `root` of an image, its own folders outside of the system are among them.
    """
    wanted = {
        image.folder: f"the working directory {image.folder}",
        home_of(image.user, root): "the home folder",
    }
    wanted |= {str(PurePosixPath(folder)): f"{folder} (env.writable)" for folder in image.folders}
    wanted.pop("/", None)
    paths: set[str] = set(_ALWAYS)
    for path, what in wanted.items():
        # The place of a path is its outermost folder, unless that belongs to the system.
        top = PurePosixPath(path).parts[1]
        is_system = top in (_SYSTEM if root is None else IMAGE_SYSTEM)
        if is_system and (root is None or top in _OURS):
            raise UnsupportedLine(f"{what} belongs to the system in the sandbox")
        if (
            is_system
            and root is not None
            and not ((root / path.lstrip("/")).is_dir() and is_direct(root, path))
        ):
            raise UnsupportedLine(f"{what} is not a folder of the image in {root}")
        paths.add(path if is_system else f"/{top}")
    if root is not None:
        own = (entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink())
        paths |= {f"/{entry.name}" for entry in own if entry.name not in IMAGE_SYSTEM}
    return tuple(
        sorted(
            p
            for p in paths
            if not any(p != q and PurePosixPath(p).is_relative_to(q) for q in paths)
        )
    )


def lay_out(
    tree: Path, places: Sequence[str], image: Image, context: Path, root: Path | None
) -> None:
    """Make an episode's tree: places, folders, and what a COPY names; raises UnsupportedLine for a
    bad COPY."""
    tree.mkdir()
    for place in places:
        source = root / place.lstrip("/") if root is not None else None
        if source is not None and source.is_dir() and place != "/tmp":
            copy_files(source, tree / part_of(place))
        else:
            (tree / part_of(place)).mkdir()
    for folder in (*image.folders, image.folder, home_of(image.user, root)):
        if folder != "/":
            _inside(tree, places, folder, f"the folder {folder}").mkdir(parents=True, exist_ok=True)
    if image.copied is not None:
        source = context / image.copied
        target = _inside(tree, places, image.folder, "the working directory")
        if not source.exists() or not is_direct(context, image.copied):
            raise UnsupportedLine(f"environment/{image.copied} is missing, or is behind a link")
        copy_files(source, target if source.is_dir() else target / source.name)
    hand_over(tree)


def outside(tree: Path, places: Iterable[str], path: str) -> Path | None:
    """Where a path of the sandbox lies in the tree, links not followed; None if it is in no
    place."""
    for place in places:
        if is_in(path, [place]):
            return tree / part_of(place) / PurePosixPath(path).relative_to(place)
    return None


def _inside(tree: Path, places: Iterable[str], path: str, what: str) -> Path:
    """As `outside`, for a path that is written to: no link may be on the way."""
    found = outside(tree, places, path)
    if found is None or not is_direct(tree, str(found.relative_to(tree))):
        raise UnsupportedLine(f"{what} leads through a link")
    return found


def find_dockerignore(context: Path) -> Path | None:
    """The file that hides files of the folder `environment` from COPY; docker prefers the one for
    this Dockerfile."""
    files = (context / name for name in ("Dockerfile.dockerignore", ".dockerignore"))
    return next((file for file in files if os.path.lexists(file)), None)
