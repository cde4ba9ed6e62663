"""What COPY and ADD see of a task's folder `environment`: all but the files that its `.dockerignore` hides.

The patterns are those of docker. The last one that fits a path, or a folder that the path is in, decides.
"""

import os
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from pathspec import PathSpec

from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import find_dockerignore

_UNCLOSED = re.compile(r"(?<!\\)\[[^\]]*$")
"""A bracket that docker refuses and git reads as itself."""


def seen_context(context: Path, work: Path) -> Path:
    """Return the folder that COPY reads: `context`, or one made in `work` without the files that are hidden."""
    ignoring = find_dockerignore(context)
    if ignoring is None:
        return context
    seen = work / context.name
    _make(context, seen)
    _fill(context, seen, "", _hidden(ignoring))
    return seen


def _fill(source: Path, target: Path, inside: str, hidden: PathSpec[Any]) -> None:
    """Put the files of a folder that are seen into `target`, which is made if there are any."""
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        path, copy = f"{inside}{entry.name}", target / entry.name
        is_seen = not hidden.match_file(path)
        if entry.is_dir(follow_symlinks=False):
            if is_seen:
                _make(Path(entry.path), copy)
            _fill(Path(entry.path), copy, f"{path}/", hidden)
        elif is_seen and (entry.is_symlink() or entry.is_file()):
            _make(source, target)
            try:
                os.link(entry.path, copy, follow_symlinks=False)
            except OSError:  # another disk, or a file of another user
                shutil.copy2(entry.path, copy, follow_symlinks=False)


def _make(source: Path, target: Path) -> None:
    """Make a folder like `source`, and those on its way, unless it is there."""
    if not target.is_dir():
        _make(source.parent, target.parent)
        target.mkdir()
        shutil.copystat(source, target)


def _hidden(file: Path) -> PathSpec[Any]:
    """Read the patterns. Docker's paths begin in the folder, as git's do after a `/`."""
    if file.is_symlink():
        raise UnsupportedLine(f"environment/{file.name} is a link")
    lines = list[str]()
    for number, line in enumerate(os.fsdecode(file.read_bytes().removeprefix(b"\xef\xbb\xbf")).splitlines(), 1):
        text = line.strip()
        if line.startswith("#") or not text:
            continue
        path = text.removeprefix("!").strip()
        cleaned = posixpath.normpath(path).lstrip("/") if path else ""
        try:
            if not cleaned or _UNCLOSED.search(cleaned):
                raise ValueError
            PathSpec.from_lines("gitignore", [cleaned])
        except (ValueError, re.error) as error:
            raise UnsupportedLine(f"line {number} of environment/{file.name} ({text}) is not a pattern") from error
        if cleaned != ".":  # docker ignores this one
            lines.append("!" * text.startswith("!") + f"/{cleaned}")
    return PathSpec.from_lines("gitignore", lines)
