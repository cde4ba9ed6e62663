"""The sandbox that a task's commands run in, for the agent and for the tests.

The programs that judge are protected from what the agent wrote: modules, settings of pytest, and processes. The folder
`judge` beside this file is shown to the tests' sandbox as `/judge`, read-only.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import SOLUTION, TESTS, VERDICT, VERIFIER_HOME, is_direct, is_in, lay_out, outside, part_of
from envs.harbor.settings import BUILD, HarborSettings
from envs.harbor.task import HarborTask
from envs.swe.sandbox.sandbox import Sandbox, python_folders, python_in
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.usage import walk
from envs.swe.sandbox.workspace import AGENT_ID, Workspace

JUDGE = "/judge"
"""What protects the judge, only there while the tests run."""
_FILES = Path(__file__).with_name("judge")
_SETTINGS = ("conftest.py", "pyproject.toml", "tox.ini", "setup.cfg", "pytest.ini", ".pytest.ini")
_SETTINGS += ("pytest.toml", ".pytest.toml")
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PERL5LIB", "PERL5OPT", "RUBYLIB", "PYTHONHOME", "NODE_OPTIONS")
"""Variables with folders from which every program loads code first."""
_GIT = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "core.pager": "cat", "core.sshCommand": "false"}
_GIT |= {"diff.external": ""}
_MAX_REPORTED = 1 << 16
"""What a pipe holds."""


def settings_files(tree: Path, places: Iterable[str]) -> dict[str, str]:
    """Files from which pytest reads settings, in the folders that the agent may change: their hashes."""
    found: dict[str, str] = {}
    for place in places:
        for entry in walk(tree / part_of(place)):
            # What cannot be read does not count as the task's.
            if entry.name in _SETTINGS and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    inside = entry.path.removeprefix(f"{tree / part_of(place)}/")
                    found[f"{place}/{inside}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def find_unfinished(pipe: int) -> str:
    """Why the tests do not count, once they have ended; empty if they do.

    Through the pipe `report`, judging processes say that they begin, and that they have come to their end. A program
    cannot take back what was said, and only the process that began knows what to say at the end.
    """
    told = b""
    while len(told) < _MAX_REPORTED and (data := os.read(pipe, _MAX_REPORTED)):
        told += data
    words = [line.split() for line in told.split(b"\n") if line.strip()]
    ended = {hashlib.sha256(line[1]).hexdigest().encode() for line in words if line[0] == b"end" and len(line) == 2}
    if any(line[0] == b"begin" and not ended.issuperset(line[1:]) for line in words):
        return "a process of the tests ended before its tests did"
    return ""


@dataclass(frozen=True)
class Machine:
    """One episode's files, and the sandboxes around them. `close` removes them."""

    task: HarborTask
    settings: HarborSettings
    workspace: Workspace
    shipped: Mapping[str, str]
    """Settings files of pytest that the task brings, and their hashes."""

    @property
    def tree(self) -> Path:
        return self.workspace.tree

    @property
    def judge(self) -> Path:
        """Folder that the tests' sandbox shows as /judge; see `_protect`."""
        return self.workspace.folder / "judge"

    @property
    def tests(self) -> Path:
        """Folder that the tests' sandbox shows as /tests, read-only."""
        return self.workspace.folder / "tests"

    def close(self) -> None:
        self.workspace.close()

    def for_agent(self) -> Sandbox:
        """Where the agent's commands run."""
        return self._sandbox(self.task.places, {"HOME": self.task.home}, self.settings.command_timeout_s)

    def for_solution(self) -> Sandbox:
        """As `for_agent`, for the reference solution: with its variables, and all of the agent's time."""
        seconds = self.task.agent_s or self.task.verifier_s
        return self._sandbox(self.task.places, {"HOME": self.task.home, **self.task.solution_variables}, seconds)

    def for_tests(self) -> Sandbox:
        """Where the tests run: with their own files and home, and with nothing of the agent in the judge's reach."""
        places = [place for place in self.task.places if place != SOLUTION]
        variables = {"HOME": VERIFIER_HOME, **self.task.verifier_variables}
        sandbox = self._sandbox((*places, VERDICT, VERIFIER_HOME), variables, self.task.verifier_s)
        fixed = [] if self.task.root is not None else [str(folder) for folder in python_folders(self.task.python)]
        given = self._protect(dict(sandbox.variables), places, fixed)
        readable = (*sandbox.readable, (self.judge, JUDGE), (self.tests, TESTS))
        return replace(sandbox, variables=tuple(given.items()), readable=readable)

    def _protect(self, given: Mapping[str, str], places: Sequence[str], fixed: Sequence[str]) -> dict[str, str]:
        """Make the folder /judge; return the variables of the tests' sandbox, from those that the task asks for.

        `places` is what the agent may change, except for `fixed`, which is mounted over it read-only.
        """

        def is_agents(path: str) -> bool:
            inside = os.path.normpath(path)
            return not path.startswith("/") or (is_in(inside, places) and not is_in(inside, fixed))

        folder = self.judge
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
        now = settings_files(self.tree, places)
        listed = {
            "places": places,
            "fixed": fixed,
            "python_path": [part for part in python_path if is_agents(part)],
            "shipped": [path for path, digest in now.items() if self.shipped.get(path) == digest],
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

    def _sandbox(self, places: Iterable[str], variables: Mapping[str, str], seconds: float) -> Sandbox:
        task, settings = self.task, self.settings
        limits = Limits(
            seconds, task.memory_mb, settings.address_mb, settings.processes, settings.file_mb, task.tree_mb
        )
        given = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "", **task.image.variables, **variables}
        if task.root is None:
            given["PATH"] = f"{task.python.parent}:{given['PATH']}"
        return Sandbox(
            self.tree,
            task.python,
            limits,
            readable=((self.workspace.folder / "passwd", "/etc/passwd"),),
            variables=tuple(given.items()),
            fixed_addresses=True,
            places=tuple((part_of(place), place) for place in places),
            folder=task.image.folder,
            root=task.root,
        )


def start(task: HarborTask, settings: HarborSettings) -> Machine:
    """Make an episode's files; raises ConfigError for a COPY that cannot be done, and for links as folders."""
    if task.root is not None:
        # On this machine, a link of the image may lead out of it.
        for path in (*task.places, "/etc/passwd"):
            if not is_direct(task.root, path):
                where = f"{path} in the image {task.root}"
                raise ConfigError(f"{task.name}: {where} is a link or lies behind one; replace the link")
    context = task.folder / "environment"
    try:
        workspace = Workspace(lambda tree: lay_out(tree, task.places, task.image, context, task.root))
    except UnsupportedLine as error:
        raise ConfigError(f"{task.name}: {error}; {BUILD}") from error
    for part in () if task.root is not None else python_in(task.places, task.python):
        # Python will be mounted there. The agent must not put anything else there before.
        covered = workspace.tree / str(outside(workspace.tree, task.places, str(part)))
        if os.path.lexists(covered):
            raise ConfigError(
                f"{task.name}: the task needs the folder {part}, where {task.python} is installed; set env.python to "
                "an interpreter elsewhere, such as /usr/bin/python3"
            )
        covered.mkdir()
    given = task.root / "etc" / "passwd" if task.root is not None else None
    known = given.read_text(encoding="utf-8", errors="replace") if given is not None and given.is_file() else ""
    known = known or "root:x:0:0:root:/root:/bin/bash\n"
    users = f"{known.rstrip()}\nagent:x:{AGENT_ID}:{AGENT_ID}::{task.home}:/bin/bash\n"
    (workspace.folder / "passwd").write_text(users, encoding="utf-8")
    return Machine(task, settings, workspace, settings_files(workspace.tree, task.places))
