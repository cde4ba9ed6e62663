"""The sandbox that a task's commands run in, for the agent and for the tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import JUDGE, SOLUTION, TESTS, VERDICT, VERIFIER_HOME, Place, lay_out, outside
from envs.harbor.protection import protect, settings_files
from envs.harbor.settings import EXPORT, HarborSettings
from envs.harbor.task import HarborTask
from envs.swe.sandbox.sandbox import AGENT_ID, Sandbox, python_folders, python_in
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import Workspace

_FOR_TESTS = (Place(VERDICT), Place(VERIFIER_HOME))


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
        """Folder that the tests' sandbox shows as /judge; see `protection.py`."""
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
        places = [place for place in self.task.places if place.path != SOLUTION]
        variables = {"HOME": VERIFIER_HOME, **self.task.verifier_variables}
        sandbox = self._sandbox((*places, *_FOR_TESTS), variables, self.task.verifier_s)
        pythons = python_folders(self.task.python) if self.task.root is None else ()
        fixed = [Place(str(folder)) for folder in pythons]
        given = protect(dict(sandbox.variables), places, fixed, self.shipped, self.judge)
        return replace(
            sandbox,
            variables=tuple(given.items()),
            readable=(*sandbox.readable, (self.judge, JUDGE), (self.tests, TESTS)),
        )

    def _sandbox(self, places: Iterable[Place], variables: Mapping[str, str], seconds: float) -> Sandbox:
        task, settings = self.task, self.settings
        limits = Limits(
            seconds=seconds,
            memory_mb=task.memory_mb,
            address_mb=settings.address_mb,
            processes=settings.processes,
            file_mb=settings.file_mb,
            tree_mb=task.tree_mb,
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
            places=tuple((place.part, place.path) for place in places),
            folder=task.image.folder,
            root=task.root,
        )


def start(task: HarborTask, settings: HarborSettings) -> Machine:
    """Make an episode's files.

    Raises:
        ConfigError: a COPY of the task's Dockerfile cannot be done, or the image has links in place of folders.
    """
    if task.root is not None:
        _refuse_links(task.name, task.root, [*(place.path for place in task.places), "/etc/passwd"])
    context = task.folder / "environment"
    try:
        workspace = Workspace(lambda tree: lay_out(tree, task.places, task.image, context, task.root))
        _reserve_python(workspace.tree, task)
    except UnsupportedLine as error:
        raise ConfigError(f"{task.name}: {error}; {EXPORT}") from error
    (workspace.folder / "passwd").write_text(_users(task), encoding="utf-8")
    return Machine(task, settings, workspace, settings_files(workspace.tree, task.places))


def _reserve_python(tree: Path, task: HarborTask) -> None:
    """Make the folders in which Python will be mounted, before the agent can put anything else there."""
    for part in () if task.root is not None else python_in((place.path for place in task.places), task.python):
        covered = tree / str(outside(tree, task.places, str(part)))
        if os.path.lexists(covered):
            raise ConfigError(
                f"{task.name}: the task needs the folder {part}, where {task.python} is installed; set env.python to "
                "an interpreter elsewhere, such as /usr/bin/python3"
            )
        covered.mkdir()


def _refuse_links(name: str, root: Path, paths: Iterable[str]) -> None:
    """Refuse an image in which a place lies behind a link: on this machine, the link may lead out of the image."""
    real = Path(os.path.realpath(root))
    for path in paths:
        if Path(os.path.realpath(root / path.lstrip("/"))) != real / path.lstrip("/"):
            raise ConfigError(f"{name}: {path} in the image {root} is a link or lies behind one; replace the link")


def _users(task: HarborTask) -> str:
    """The file /etc/passwd: the image's users, and the one that commands run as."""
    number = AGENT_ID if os.geteuid() == 0 else os.getuid()
    given = task.root / "etc" / "passwd" if task.root is not None else None
    known = given.read_text(encoding="utf-8", errors="replace") if given is not None and given.is_file() else ""
    known = known or "root:x:0:0:root:/root:/bin/bash\n"
    return f"{known.rstrip()}\nagent:x:{number}:{number}::{task.home}:/bin/bash\n"
