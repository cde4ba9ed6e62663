"""Finds files with which the agent would judge itself.

`python -m pytest` looks for modules in the current folder first, so a `pytest.py` there would judge in pytest's place.
A link into the tests' folder, which is there only later, would be compared with itself.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from envs.harbor.places import TESTS, VERDICT, VERIFIER_HOME, outside
from envs.harbor.task import HarborTask

_FROM_FOLDER = re.compile(
    r"\bpython[\d.]*\s+(-[WX]\s*\S+\s+|-\w+\s+)*(-\w*[mc]|-(\s|$)|<)|['\"]-m['\"],\s*['\"](pytest|unittest)",
    re.MULTILINE,
)
"""Ways to start Python with the current folder first on its path, in a shell and from Python."""
_MOST_LINKS = 40
"""As many as Linux follows."""
_MODULES = {"pytest", "_pytest", "pluggy", "iniconfig", "sitecustomize", "usercustomize", *sys.stdlib_module_names}
_MODULES -= {"test"}  # no test runner imports it, and scratch files have this name


def find_planted(tree: Path, task: HarborTask, variables: Mapping[str, str], command: str) -> str:
    """A sentence about the first such file; empty if there is none.

    Args:
        variables: of the tests' sandbox.
        command: the command that judges. The scripts in the task's folder `tests` are read, too.
    """
    folders = [folder for folder in variables.get("PYTHONPATH", "").split(":") if folder]
    if any(_FROM_FOLDER.search(text) for text in (command, *_scripts(task.folder / "tests"))):
        folders.append(task.image.folder)
    if link := _link_to_the_tests(tree, task):
        return link
    for folder in folders:
        place = outside(tree, task.places, folder)
        if place is None or not place.is_dir():
            continue
        if Path(os.path.realpath(place)) != Path(os.path.realpath(tree)) / place.relative_to(tree):
            return f"{folder} was replaced by a link"
        for name in _replaced_modules(place):
            if not _came_with(task, folder, name):
                return f"{folder} holds {name}, which the tests would load in place of their own module"
    return ""


def _scripts(folder: Path) -> Iterator[str]:
    """The shell and Python scripts in a folder."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".sh", ".py") and file.is_file():
            with file.open("rb") as opened:
                yield opened.read(1 << 20).decode("utf-8", "replace")


def _replaced_modules(folder: Path) -> Iterator[str]:
    """Names in a folder that Python, or pytest, would load by themselves."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            stem, _, ending = entry.name.partition(".")
            is_module = stem in _MODULES and ending.rpartition(".")[2] in ("", "py", "pyc", "so")
            is_metadata = ending.endswith(("dist-info", "egg-info"))
            if entry.is_symlink():
                found = is_module or is_metadata  # what it leads to is known only inside
            elif entry.is_dir():
                path = Path(entry.path)
                found = is_metadata and _registers_plugin(path / "entry_points.txt")
                found = found or (is_module and not ending and any(path.glob("__init__.*")))
            else:
                found = is_module and bool(ending)
            if found:
                yield entry.name


def _registers_plugin(file: Path) -> bool:
    """Whether an installed package's file names a plugin of pytest, or may do so behind a link."""
    if file.is_symlink() or not file.is_file():
        return file.is_symlink()
    with file.open("rb") as opened:
        return b"pytest11" in opened.read(1 << 20)


def _came_with(task: HarborTask, folder: str, name: str) -> bool:
    """Whether the task itself puts a file of this name there."""
    if task.root is not None:
        return (task.root / folder.lstrip("/") / name).exists()
    return any(path.name == name for path in (task.folder / "environment").rglob(name))


def _link_to_the_tests(tree: Path, task: HarborTask) -> str:
    """A sentence about a link of the agent that leads to files of the tests, or to a folder above them."""
    for place in task.places:
        for path in _links(tree / place.part):
            inside = PurePosixPath(place.path, os.path.relpath(path, tree / place.part))
            try:
                target = _resolved(inside, tree, task)
            except OSError as error:
                return f"{inside} cannot be checked ({error.strerror})"
            if any(_overlap(target, PurePosixPath(other)) for other in (TESTS, VERDICT, VERIFIER_HOME, "/proc")):
                return f"{inside} is a link to {target}"
    return ""


def _links(folder: Path) -> Iterator[str]:
    """The links in a folder, however deep; what cannot be listed counts as one. `os.walk` would recurse."""
    waiting = [str(folder)]
    while waiting:
        current = waiting.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        yield entry.path
                    elif entry.is_dir():
                        waiting.append(entry.path)
        except OSError:
            yield current


def _overlap(path: PurePosixPath, other: PurePosixPath) -> bool:
    return path.is_relative_to(other) or other.is_relative_to(path)


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
        if followed > _MOST_LINKS:
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
