"""Protects the programs that judge from what the agent wrote: modules, settings of pytest, and processes.

The folder `judge` beside this file is shown to the tests' sandbox as `/judge`, read-only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from envs.harbor.places import JUDGE, Place
from envs.swe.sandbox.folders import walk

_FILES = Path(__file__).with_name("judge")
_SETTINGS = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PERL5LIB", "PERL5OPT", "RUBYLIB", "PYTHONHOME", "NODE_OPTIONS")
"""Variables with folders from which every program loads code first."""
_GIT = {
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.pager": "cat",
    "core.sshCommand": "false",
    "diff.external": "",
}
_MAX_REPORTED = 1 << 16
"""What a pipe holds."""


def protect(
    given: Mapping[str, str],
    places: Sequence[Place],
    fixed: Sequence[Place],
    shipped: Mapping[str, str],
    folder: Path,
) -> dict[str, str]:
    """Make the folder to show as /judge; return the variables of the tests' sandbox.

    Args:
        given: the variables that the task asks for.
        places: what the agent may change, except for `fixed`, which is mounted over it read-only.
        shipped: what `settings_files` found before the agent came.
    """

    def is_agents(path: str) -> bool:
        inside = os.path.normpath(path)
        changed = any(place.holds(inside) for place in places) and not any(place.holds(inside) for place in fixed)
        return not path.startswith("/") or changed

    shutil.rmtree(folder, ignore_errors=True)
    plugin = f"judge_{uuid.uuid4().hex}"
    folder.mkdir()
    folder.chmod(0o755)
    for name in ("sitecustomize.py", "bash_env"):
        shutil.copyfile(_FILES / name, folder / name)
    shutil.copyfile(_FILES / "plugin.py", folder / f"{plugin}.py")
    os.mkfifo(folder / "report")
    (folder / "report").chmod(0o622)
    found = dict(given)
    for name in _SEARCHED:
        if name in found:
            found[name] = ":".join(part for part in found[name].split(":") if not is_agents(part))
    python_path = [part for part in found.get("PYTHONPATH", "").split(":") if part]
    now = settings_files(folder.parent / "tree", places)
    listed = {
        "places": [place.path for place in places],
        "fixed": [place.path for place in fixed],
        "python_path": [part for part in python_path if is_agents(part)],
        "shipped": [path for path, digest in now.items() if shipped.get(path) == digest],
    }
    for name, parts in listed.items():
        (folder / name).write_bytes(b"\0".join(map(os.fsencode, parts)))
    found["PYTHONPATH"] = ":".join([JUDGE, *(part for part in python_path if not is_agents(part))])
    found["PYTEST_PLUGINS"] = ",".join([plugin, *filter(None, [found.get("PYTEST_PLUGINS")])])
    found["BASH_ENV"] = f"{JUDGE}/bash_env"
    found |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": str(len(_GIT))}
    for number, (key, value) in enumerate(_GIT.items()):
        found |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return found


def settings_files(tree: Path, places: Iterable[Place]) -> dict[str, str]:
    """Files from which pytest reads settings, in the folders that the agent may change: their hashes."""
    found: dict[str, str] = {}
    for place in places:
        for entry in walk(tree / place.part):
            # What cannot be read does not count as the task's.
            if entry.name in _SETTINGS and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    inside = entry.path.removeprefix(f"{tree / place.part}/")
                    found[f"{place.path}/{inside}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


class Report(contextlib.AbstractContextManager["Report"]):
    """What the judging processes say of themselves: that they begin, and that they have come to their end.

    It arrives through a pipe, so a program cannot take back what was said. Only who began knows what to say at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._pipe = os.open(folder / "report", os.O_RDONLY | os.O_NONBLOCK)

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)

    def problem(self) -> str:
        """Why the tests do not count, once they have ended; empty if they do."""
        told = b""
        while len(told) < _MAX_REPORTED and (data := os.read(self._pipe, _MAX_REPORTED)):
            told += data
        words = [line.split() for line in told.split(b"\n") if line]
        ended = {hashlib.sha256(line[1]).hexdigest().encode() for line in words if line[0] == b"end" and len(line) == 2}
        if any(line[0] == b"begin" and not ended.issuperset(line[1:]) for line in words):
            return "a process of the tests ended before its tests did"
        return ""
