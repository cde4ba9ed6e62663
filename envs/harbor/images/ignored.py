"""What COPY and ADD see of a task's folder `environment`: all but the files that its `.dockerignore` hides.

The patterns are those of docker. The last one that fits a path, or a folder that the path is in, decides.
"""

import os
import posixpath
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import find_dockerignore

_Pattern = tuple[bool, re.Pattern[str]]
"""Whether the files that fit are hidden, or seen again; and which paths fit."""


def seen_context(context: Path, work: Path) -> Path:
    """Return the folder that COPY reads: `context`, or one made in `work` without the files that are hidden."""
    ignoring = find_dockerignore(context)
    patterns = _patterns(ignoring) if ignoring is not None else []
    if not patterns:
        return context
    seen = work / context.name
    _make(context, seen)
    _fill(context, seen, "", patterns)
    return seen


def _fill(source: Path, target: Path, inside: str, patterns: Sequence[_Pattern]) -> None:
    """Put the files of a folder that are seen into `target`, which is made if there are any."""
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        path, copy = f"{inside}{entry.name}", target / entry.name
        is_seen = not _is_hidden(path, patterns)
        if entry.is_dir(follow_symlinks=False):
            if is_seen:
                _make(Path(entry.path), copy)
            _fill(Path(entry.path), copy, f"{path}/", patterns)
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


def _is_hidden(path: str, patterns: Sequence[_Pattern]) -> bool:
    parts = path.split("/")
    paths = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    fitting = (hides for hides, pattern in reversed(patterns) if any(map(pattern.fullmatch, paths)))
    return next(fitting, False)


def _patterns(file: Path) -> list[_Pattern]:
    if file.is_symlink():
        raise UnsupportedLine(f"environment/{file.name} is a link")
    found = list[_Pattern]()
    for number, line in enumerate(os.fsdecode(file.read_bytes().removeprefix(b"\xef\xbb\xbf")).splitlines(), 1):
        text = line.strip()
        if line.startswith("#") or not text:
            continue
        hides, text = text[0] != "!", text.removeprefix("!").strip()
        cleaned = posixpath.normpath(text).lstrip("/") if text else ""
        try:
            if not text:
                raise ValueError
            pattern = re.compile(_expression(cleaned), re.DOTALL)
        except (ValueError, re.error) as error:
            raise UnsupportedLine(f"line {number} of environment/{file.name} ({line.strip()}) is no pattern") from error
        if cleaned != ".":  # docker ignores this one
            found.append((hides, pattern))
    return found


def _expression(pattern: str) -> str:
    """A pattern of docker as a regular expression. `**` stands for any number of folders."""
    found, waiting = "", list(reversed(pattern))
    while waiting:
        char = waiting.pop()
        if char == "*" and waiting and waiting[-1] == "*":
            waiting.pop()
            if waiting and waiting[-1] == "/":
                waiting.pop()
            found += "(.*/)?" if waiting else ".*"
        elif char in "*?":
            found += "[^/]*" if char == "*" else "[^/]"
        elif char == "\\":
            found += re.escape(waiting.pop()) if waiting else r"\\"
        else:
            found += f"\\{char}" if char in ".+()|{}$" else char
    return found
