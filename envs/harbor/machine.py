"""The sandbox that a task's commands run in, for the agent and for the tests."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.places import (
    SOLUTION,
    TESTS,
    VERDICT,
    VERIFIER_HOME,
    is_direct,
    is_in,
    lay_out,
    outside,
    part_of,
)
from envs.harbor.reward import FILES
from envs.harbor.settings import BUILD, HarborSettings
from envs.harbor.task import HarborTask
from envs.swe.sandbox.sandbox import Sandbox, python_folders, python_in
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import AGENT_ID, Workspace

SESSION = "session.xml"
"""pytest's own report about its last session, beside the reward."""
_REWARDS = "rewards"
"""Folder of the tree with the reward files; no place of the agent is called so."""
_SEARCHED = re.compile(
    r"\w*PATH|\w*LIB|LD_\w+|BASH_ENV|ENV|PYTHON(HOME|STARTUP|PYCACHEPREFIX|USERBASE|EXECUTABLE)|GIT_CONFIG\w*|\w+RC"
    r"|(NODE|PERL5?|RUBY|JAVA\w*)_?OPT\w*"
)
"""Variables that name what programs run or load first."""


@dataclass(frozen=True)
class Machine:
    """One episode's files, and the sandboxes around them. `close` removes them."""

    task: HarborTask
    settings: HarborSettings
    workspace: Workspace

    @property
    def tree(self) -> Path:
        return self.workspace.tree

    @property
    def rewards(self) -> Path:
        """Folder of the reward files, each of which the tests' sandbox shows in /logs/verifier."""
        return self.workspace.folder / "tree" / _REWARDS

    @property
    def tests(self) -> Path:
        """Folder that the tests' sandbox shows as /tests, read-only."""
        return self.workspace.folder / "tests"

    def close(self) -> None:
        self.workspace.close()

    def for_agent(self) -> Sandbox:
        """Where the agent's commands run."""
        return self._sandbox(
            self.task.places, {"HOME": self.task.home}, self.settings.command_timeout_s
        )

    def for_solution(self) -> Sandbox:
        """As `for_agent`, for the reference solution: with its variables, and all of the agent's
        time."""
        seconds = self.task.agent_s or self.task.verifier_s
        return self._sandbox(
            self.task.places, {"HOME": self.task.home, **self.task.solution_variables}, seconds
        )

    def for_tests(self) -> Sandbox:
        """Where the tests run: with their own files and home, and nothing of the agent in their
        search paths."""
        places = [place for place in self.task.places if place != SOLUTION]
        readable_tests = (self.tests, TESTS)
        if self.task.is_judged_in_place:
            variables = {"HOME": self.task.home, **self.task.verifier_variables}
            sandbox = self._sandbox((*places, VERDICT), variables, self.task.verifier_s)
            return replace(sandbox, readable=(*sandbox.readable, readable_tests))
        variables = {"HOME": VERIFIER_HOME, **self.task.verifier_variables}
        if self.task.uses_pytest:
            # pytest writes it at its end, so a session that imported code ends early leaves none.
            added = variables.get(
                "PYTEST_ADDOPTS", self.task.image.variables.get("PYTEST_ADDOPTS", "")
            )
            variables["PYTEST_ADDOPTS"] = f"{added} --junit-xml={VERDICT}/{SESSION}".strip()
        sandbox = self._sandbox((*places, VERDICT, VERIFIER_HOME), variables, self.task.verifier_s)
        rewards = tuple((f"{_REWARDS}/{name}", f"{VERDICT}/{name}") for name in FILES)
        return replace(
            sandbox,
            variables=tuple(self._without_agents_folders(dict(sandbox.variables)).items()),
            places=(*sandbox.places, *rewards),
            readable=(*sandbox.readable, readable_tests),
            is_verdict=True,
        )

    def _without_agents_folders(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables whose search paths name no folder that the agent may change."""
        # This machine's Python is mounted over such a folder, read-only.
        fixed = (
            []
            if self.task.root is not None
            else [str(folder) for folder in python_folders(self.task.python)]
        )

        def is_agents(path: str) -> bool:
            inside = os.path.normpath(path)
            if not path.startswith("/") or is_in(inside, ("/proc", "/dev")):
                # Links in these folders lead anywhere.
                return True
            return is_in(inside, self.task.places) and not is_in(inside, fixed)

        found = dict(given)
        for name in filter(_SEARCHED.fullmatch, given):
            kept = [part for part in given[name].split(":") if not is_agents(part)]
            found[name] = ":".join(kept)
            if not kept:
                del found[name]
        return found

    def _sandbox(
        self, places: Iterable[str], variables: Mapping[str, str], seconds: float
    ) -> Sandbox:
        task = self.task
        settings = self.settings
        limits = Limits(
            seconds,
            task.memory_mb,
            settings.address_mb,
            settings.processes,
            settings.file_mb,
            task.tree_mb,
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
    """Make an episode's files; raises ConfigError for a COPY that cannot be done, and for links as
    folders."""
    if task.root is not None:
        # On this machine, a link of the image may lead out of it.
        for path in (*task.places, "/etc/passwd"):
            if not is_direct(task.root, path):
                where = f"{path} in the image {task.root}"
                raise ConfigError(
                    f"{task.name}: {where} is a link or lies behind one; replace the link"
                )
    context = task.folder / "environment"
    try:
        workspace = Workspace(
            lambda tree: lay_out(tree, task.places, task.image, context, task.root)
        )
    except UnsupportedLine as error:
        raise ConfigError(f"{task.name}: {error}; {BUILD}") from error
    for part in () if task.root is not None else python_in(task.places, task.python):
        # Python will be mounted there. The agent must not put anything else there before.
        covered = workspace.tree / str(outside(workspace.tree, task.places, str(part)))
        if os.path.lexists(covered):
            raise ConfigError(
                f"{task.name}: the task needs the folder {part}, where {task.python} is installed; "
                "set env.python to an interpreter elsewhere, such as /usr/bin/python3"
            )
        covered.mkdir()
    given = task.root / "etc" / "passwd" if task.root is not None else None
    known = (
        given.read_text(encoding="utf-8", errors="replace")
        if given is not None and given.is_file()
        else ""
    )
    known = known or "root:x:0:0:root:/root:/bin/bash\n"
    users = f"{known.rstrip()}\nagent:x:{AGENT_ID}:{AGENT_ID}::{task.home}:/bin/bash\n"
    (workspace.folder / "passwd").write_text(users, encoding="utf-8")
    return Machine(task, settings, workspace)
