"""Decides outside the agent's sandbox whether a task is solved. See `docs/swe.md`, "How a verdict
is made".

Tests run in a fresh sandbox, and the outcome of each is read outside of it. Tested code shares a
process with pytest, so it could forge a green report; a verdict does not depend on an honest
report: the probes must have shown the right values before. Invariant: hidden tests run only after
all probes were right. On an unsolved tree only the tests that the agent could read run.
"""

import functools
import json
import random
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import TESTBED, hand_over
from envs.swe.verdict.instances import Instance
from envs.swe.verdict.probe_files import TRUTHS, Probe, ProbeFiles, probe_files
from envs.swe.verdict.reports import NotCounted, ProbeRecord, TestRun, read_records
from envs.swe.verdict.trees import (
    Build,
    Change,
    build_tree,
    counted_changes,
    is_protected,
    is_readable,
    scratch_tree,
)
from envs.swe.verdict.values import Unreadable
from envs.swe.verdict.values import fits as value_fits

_FOLDER, _SCRIPTS = "/judge", ("pytest_script.py", "encoding.py")
"""Where the sandbox shows the scripts; the first of them is run."""
_FIXED_ARGS = (
    "-q",
    "--tb=no",
    "--color=no",
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
)
_BROKEN_CODES = (3, 4)
"""pytest's exit statuses for an internal error and for a command line or configuration that it
refuses."""
PROBES_TIME = 3
"""The probes of one verdict together take no longer than this many times the limit of one run."""
ProbeReports = Mapping[tuple[str, int], list[ProbeRecord]]
"""What each probe reported in each test, in order; by the test's id and the probe's number."""


@dataclass(frozen=True)
class TestSettings:
    """How tests are run: interpreter, limits, pytest arguments of this repository, and whether
    tests may write into the tree that they are read from."""

    __test__ = False
    python: Path
    limits: Limits
    test_args: tuple[str, ...] = ()
    writable_tests: bool = False


def run_tests(build: Build, ids: Iterable[str], settings: TestSettings) -> TestRun:
    """Build a tree, run the tests `ids` in it (all that pytest finds, if none are named), and
    remove it.

    Raises NotCounted if pytest did not come to its end, or its report is malformed.
    """
    ids = tuple(ids)
    with scratch_tree() as tree:
        build(tree)
        files = files_of(tree, ids)
        if ids and not files:
            raise NotCounted("none of the required test files exists")
        return read_report(run_pytest(tree, files, {"ids": ids}, settings))


def run_pytest(
    tree: Path,
    files: Iterable[str],
    job: Mapping[str, Any],
    settings: TestSettings,
    hash_seed: int = 0,
) -> Outcome:
    """Run `pytest_script.py` on test files of a tree, in a fresh sandbox; `job` says which tests
    and what to report."""
    hand_over(tree)
    sandbox = Sandbox(
        tree,
        settings.python,
        settings.limits,
        readable=tuple((Path(__file__).with_name(name), f"{_FOLDER}/{name}") for name in _SCRIPTS),
        variables=(("PYTHONHASHSEED", str(hash_seed)),),
        writable_tree=settings.writable_tests,
    )
    args = [f"--rootdir={TESTBED}", "-o", "addopts=", *_FIXED_ARGS, *settings.test_args, *files]
    stdin = json.dumps({**job, "roots": source_roots(tree), "args": args}).encode()
    return sandbox.run(
        [str(settings.python), "-s", "-B", f"{_FOLDER}/{_SCRIPTS[0]}"], stdin, with_report=True
    )


def files_of(tree: Path, tests: Iterable[str]) -> list[str]:
    """The files of some tests, as far as they are in the tree."""
    return [
        file
        for file in dict.fromkeys(test.split("::", 1)[0] for test in tests)
        if (tree / file).is_file()
    ]


def source_roots(tree: Path) -> list[str]:
    """Folders inside the sandbox from which the repository's packages are imported."""
    return [f"{TESTBED}/src", TESTBED] if (tree / "src").is_dir() else [TESTBED]


def read_report(outcome: Outcome) -> TestRun:
    """Read what an ordinary run reported; raises as `run_tests`."""
    runs = read_records(TestRun, outcome)
    if len(runs) != 1:
        raise NotCounted(
            "the tests did not run to their end, or reported it twice (exit status "
            f"{outcome.returncode})"
        )
    if runs[0].code != outcome.returncode:
        raise NotCounted("pytest's verdict and the exit status differ")
    if outcome.returncode in _BROKEN_CODES:
        last = (outcome.output.strip() or "it printed nothing").splitlines()[-1]
        raise NotCounted(
            f"pytest could not run the tests (exit status {outcome.returncode}): {last}"
        )
    return runs[0]


@dataclass(frozen=True)
class Expected:
    """What one probe must report while one test runs: its operator, and for each time that it runs
    what is expected."""

    test: str
    number: int
    operator: str
    exception: str
    values: tuple[Any, ...]
    draw: int = 0
    """The set of drawn arguments; 0 for the test's own."""

    @property
    def key(self) -> tuple[str, int]:
        return self.test, self.number

    def fits(self, reports: ProbeReports) -> bool:
        """Whether the probe reported this, neither less nor more."""
        found = reports.get(self.key, [])
        try:
            return len(found) == len(self.values) and all(
                value_fits(self.operator, self.exception, report, value)
                for report, value in zip(found, self.values, strict=True)
            )
        except Unreadable:
            return False


@dataclass(frozen=True)
class Plan:
    """The valid probes of an instance. It stays outside of the sandbox."""

    expected: tuple[Expected, ...]
    places: Mapping[str, tuple[str, int]]
    """Each test's function, and its number among the tests that `parametrize` makes of it."""
    packages: frozenset[str]
    """Names of what is tested, in the reference's tree. In the agent's, they would be the agent's
    choice."""
    note: str = ""
    """What is worth knowing about the instance, in words."""


@dataclass(frozen=True)
class ProbeRun:
    """The probes of a tree, and what they reported."""

    probes: Mapping[int, Probe]
    reports: ProbeReports


def write_probes(
    tree: Path, instance: Instance, plan: Plan, draw: int = 0, with_expected: bool = False
) -> ProbeFiles:
    """Put probe files in the place of a tree's tests."""
    files = probe_files(
        tree, lambda path: is_protected(path, instance), plan.packages, draw, with_expected
    )
    for path, text in files.texts.items():
        (tree / path).write_text(text, encoding="utf-8")
    return files


def run_probes(
    build: Build,
    instance: Instance,
    plan: Plan,
    settings: TestSettings,
    tests: Iterable[str],
    draw: int = 0,
    with_expected: bool = False,
    leaks: Mapping[int, Collection[str]] | None = None,
) -> ProbeRun:
    """Run the probes of `tests` on a tree; with `with_expected`, they also report what the tests
    expect.

    `leaks` has values by probe: those that an object holds before the call are reported as seen.
    Raises NotCounted if the run was stopped, or if a line of the report is not ours.
    """
    with scratch_tree() as tree:
        build(tree)
        files = write_probes(tree, instance, plan, draw, with_expected)
        places = {test: plan.places[test] for test in tests if test in plan.places}
        own = {(files.renamed(function), index): test for test, (function, index) in places.items()}
        kinds = {number: probe.operator for number, probe in files.probes.items()}
        job = {
            "wanted": list(own),
            "truths": [n for n, kind in kinds.items() if kind in TRUTHS],
            "values": [n for n, kind in kinds.items() if kind not in (*TRUTHS, "none")],
            "leaks": {str(number): list(values) for number, values in (leaks or {}).items()},
        }
        # Other seeds each time: what a set prints must not matter.
        outcome = run_pytest(
            tree, files_of(tree, places), job, settings, random.SystemRandom().randrange(1, 1000)
        )
    reports: dict[tuple[str, int], list[ProbeRecord]] = {}
    for record in read_records(ProbeRecord, outcome):
        function, index = record.test or ("", 0)
        if (function, index) in own:
            reports.setdefault((own[function, index], record.probe), []).append(record)
    return ProbeRun(files.probes, reports)


@dataclass(frozen=True)
class Verdict:
    """Whether the task is solved, the share of tests of each kind that passed, and why not more."""

    solved: bool
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""

    @property
    def progression(self) -> float:
        """0..1; a product, so that doing nothing is worth nothing although most tests are green
        from the start."""
        return self.fail_to_pass * self.pass_to_pass


def evaluate(
    instance: Instance, pristine: Path, tree: Path, settings: TestSettings, plan: Plan
) -> Verdict:
    """Judge the agent's `tree`. What the agent did ends in a verdict, never in an error."""
    try:
        return _evaluate(
            instance, pristine, counted_changes(tree, pristine, instance), settings, plan
        )
    except NotCounted as error:
        return Verdict(False, reason=str(error))


def _evaluate(
    instance: Instance,
    pristine: Path,
    changes: Mapping[str, Change],
    settings: TestSettings,
    plan: Plan,
) -> Verdict:
    build = functools.partial(
        build_tree, pristine=pristine, test_patch=instance.test_patch, changes=changes
    )
    wrong = _wrong_tests(instance, settings, plan, build)
    if not wrong:
        return _verdict(instance, run_tests(build, instance.required, settings).green)
    # Of a tree with wrong probes, readable tests run; a hidden one counts if all its probes are
    # right.
    readable = [test for test in instance.required if is_readable(test, instance, pristine)]
    green = {one.test for one in plan.expected}.difference(readable)
    if readable:
        green |= run_tests(
            functools.partial(build_tree, pristine=pristine, changes=changes), readable, settings
        ).green
    verdict = _verdict(instance, green - wrong)
    clue = f"what {min(wrong)} calls returns something else where the expected value is not at hand"
    return replace(verdict, reason=f"{verdict.reason}; {clue}")


def _verdict(instance: Instance, green: Collection[str]) -> Verdict:
    red = [test for test in instance.required if test not in green]
    reason = (
        f"{len(red)} of {len(instance.required)} required tests are not green, as {red[0]}"
        if red
        else ""
    )
    tests = instance.fail_to_pass, instance.pass_to_pass
    fail, keep = (
        sum(test in green for test in some) / len(some) if some else 1.0 for some in tests
    )
    return Verdict(not red, fail, keep, reason)


def _wrong_tests(instance: Instance, settings: TestSettings, plan: Plan, build: Build) -> set[str]:
    """The tests with a wrong probe; raises NotCounted if the probes did not run in time."""
    wrong = set[str]()
    limits = settings.limits
    deadline = time.monotonic() + PROBES_TIME * limits.seconds
    for draw in sorted({one.draw for one in plan.expected}):
        expected = [one for one in plan.expected if one.draw == draw]
        tests = dict.fromkeys(one.test for one in expected)
        seconds = max(min(limits.seconds, deadline - time.monotonic()), 0.0)
        timed = replace(settings, limits=replace(limits, seconds=seconds))
        run = run_probes(build, instance, plan, timed, tests, draw)
        for one in expected:
            if time.monotonic() > deadline:
                raise NotCounted("the time for judging was used up")
            if not one.fits(run.reports):
                wrong.add(one.test)
    return wrong
