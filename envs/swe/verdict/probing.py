"""Runs the probes of an instance on a tree, and compares what they report with the plan.

A `Plan` is what validation found out: per test, what each of its probes must report. It stays outside of the sandbox.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.swe.instances import Instance
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.workspace import hand_over
from envs.swe.verdict.changes import is_protected
from envs.swe.verdict.probe_files import TRUTHS, Probe, ProbeFiles, probe_files
from envs.swe.verdict.runs import JudgeSettings, pytest_args, source_roots
from envs.swe.verdict.trees import Build, scratch_tree
from envs.swe.verdict.values import Unreadable, fits

_FOLDER = "/judge"
_SCRIPTS = ("probe_script.py", "encoding.py")
Report = Mapping[str, Any]
Reports = Mapping[str, Mapping[int, list[Report]]]
"""What each probe of each test reported, in order."""


@dataclass(frozen=True)
class Expected:
    """What one probe must report while one test runs: its operator, and for each time that it runs what is expected."""

    operator: str
    exception: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """The valid probes of an instance: for each draw of arguments (0: the tests' own), each test and each probe."""

    draws: Mapping[int, Mapping[str, Mapping[int, Expected]]]
    places: Mapping[str, str]
    """Where pytest finds each test: its function, and its number among those that `parametrize` makes of it."""
    packages: frozenset[str]
    """Names of what is tested, in the reference's tree. In the agent's, they would be the agent's choice."""
    note: str = ""
    """What is worth knowing about the instance, in words."""


@dataclass(frozen=True)
class ProbeRun:
    """What a run of probe files reported; `reason` is set if none of it counts."""

    reports: Reports = field(default_factory=dict)
    items: Mapping[str, str] = field(default_factory=dict)
    """The probes' name of each test, if they were only collected."""
    reason: str = ""


class Prober:
    """Makes and runs the probe files of one instance."""

    def __init__(self, instance: Instance, settings: JudgeSettings, packages: frozenset[str]) -> None:
        self.instance, self.settings, self.packages = instance, settings, packages

    def collect(self, build: Build) -> Mapping[str, str]:
        """For each test that pytest finds, its place: the function's name and its number among those parametrized."""
        with scratch_tree() as tree:
            build(tree)
            hand_over(tree)
            return self._run(tree, {"wanted": None}, self.instance.required, None).items

    def run(
        self,
        build: Build,
        places: Mapping[str, str],
        tests: Collection[str],
        draw: int = 0,
        answering: bool = False,
        leaks: Mapping[int, Collection[str]] | None = None,
    ) -> tuple[ProbeRun, Mapping[int, Probe]]:
        """Run the probes of `tests` on a tree; with `answering`, they also report what the tests expect.

        `leaks` has values by probe: those that the probe's callers hold are reported as seen.
        """
        with scratch_tree() as tree:
            build(tree)
            files = self._write(tree, draw, answering)
            hand_over(tree)
            names = {test: _renamed(places[test], files) for test in tests if test in places}
            kinds = {number: probe.operator for number, probe in files.probes.items()}
            job = {
                "wanted": [_place(name) for name in names.values()],
                "truths": [n for n, kind in kinds.items() if kind in TRUTHS],
                "values": [n for n, kind in kinds.items() if kind not in (*TRUTHS, "none")],
                "leaks": {str(number): list(values) for number, values in (leaks or {}).items()},
            }
            own = {name: test for test, name in names.items()}
            return self._run(tree, job, names, own), files.probes

    def _write(self, tree: Path, draw: int, answering: bool) -> ProbeFiles:
        files = probe_files(tree, lambda path: is_protected(path, self.instance), self.packages, draw, answering)
        for path, text in files.texts.items():
            (tree / path).write_text(text, encoding="utf-8")
        return files

    def _run(self, tree: Path, job: dict[str, Any], tests: Iterable[str], own: Mapping[str, str] | None) -> ProbeRun:
        paths = [f for f in dict.fromkeys(i.split("::", 1)[0] for i in tests) if (tree / f).is_file()]
        settings = self.settings
        sandbox = Sandbox(
            tree,
            settings.python,
            settings.limits,
            readable=tuple((Path(__file__).with_name(name), f"{_FOLDER}/{name}") for name in _SCRIPTS),
            # Other seeds each time: what a set prints must not matter.
            variables=(("PYTHONHASHSEED", str(random.SystemRandom().randrange(1, 1000))),),
            writable_tree=settings.writable_tests,
        )
        empty = {"truths": [], "values": [], "leaks": {}}
        job = {**empty, **job, "roots": source_roots(tree), "args": pytest_args(settings, paths)}
        argv = [str(settings.python), "-s", "-B", f"{_FOLDER}/{_SCRIPTS[0]}"]
        outcome = sandbox.run_with_report(argv, json.dumps(job).encode())
        if outcome.stopped:
            return ProbeRun(reason=f"the tests were stopped by their {outcome.stopped} limit")
        return _read(outcome.report, own)


def _renamed(place: str, files: ProbeFiles) -> str:
    test, _, index = place.rpartition("#")
    return f"{files.renamed(test)}#{index}"


def _place(name: str) -> tuple[str, int]:
    test, _, index = name.rpartition("#")
    return test, int(index)


def _read(report: bytes, own: Mapping[str, str] | None) -> ProbeRun:
    """Sort the lines of a report by test and probe. A line that is not one of ours spoils the whole report."""
    reports: dict[str, dict[int, list[Report]]] = {}
    items: dict[str, str] = {}
    try:
        for line in report.splitlines():
            record = json.loads(line)
            name = "#".join(map(str, record["test"] or ("", 0)))
            if own is None:
                items[str(record["item"])] = name
            elif name in own:
                reports.setdefault(own[name], {}).setdefault(int(record["probe"]), []).append(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ProbeRun(reason="the report of the probes was tampered with")
    return ProbeRun(reports, items)


def wrong_probes(expected: Mapping[str, Mapping[int, Expected]], reports: Reports) -> Mapping[str, tuple[int, ...]]:
    """The probes of each test that report something else than expected, too little or too much."""
    wrong: dict[str, tuple[int, ...]] = {}
    for test, probes in expected.items():
        found = reports.get(test, {})
        bad = tuple(number for number, one in probes.items() if not _fits(one, found.get(number, [])))
        if bad:
            wrong[test] = bad
    return wrong


def _fits(expected: Expected, reports: list[Report]) -> bool:
    pairs = zip(reports, expected.values, strict=True)
    try:
        return len(reports) == len(expected.values) and all(
            fits(expected.operator, expected.exception, report, value) for report, value in pairs
        )
    except Unreadable:
        return False
