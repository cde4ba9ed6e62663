"""Decides outside the agent's sandbox whether a task is solved. See `docs/swe.md`, "How a verdict is made".

Invariant: hidden tests run only after all probes were right. On an unsolved tree only the tests that the agent could
read run.
"""

import json
import random
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.swe.verdict.instances import Instance
from envs.swe.verdict.probe_files import TRUTHS, Probe, probe_files
from envs.swe.verdict.runs import JudgeSettings, TestRun, files_of, run_pytest, run_tests
from envs.swe.verdict.trees import Build, TooMuchChanged, counted_changes, is_protected, is_readable, scratch_tree
from envs.swe.verdict.values import Unreadable, fits

PROBES_TIME = 3
"""The probes of one verdict together take no longer than this many times the limit of one run."""
Report = Mapping[str, Any]
Reports = Mapping[tuple[str, int], list[Report]]
"""What each probe reported in each test, in order; by the test's id and the probe's number."""


@dataclass(frozen=True)
class Expected:
    """What one probe must report while one test runs: its operator, and for each time that it runs what is expected."""

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

    def fits(self, reports: Reports) -> bool:
        """Whether the probe reported this, neither less nor more."""
        found = reports.get(self.key, [])
        try:
            return len(found) == len(self.values) and all(
                fits(self.operator, self.exception, report, value)
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
    """Names of what is tested, in the reference's tree. In the agent's, they would be the agent's choice."""
    note: str = ""
    """What is worth knowing about the instance, in words."""


@dataclass(frozen=True)
class ProbeRun:
    """What the probes reported; `reason` is set if none of it counts."""

    probes: Mapping[int, Probe]
    reports: Reports = field(default_factory=dict)
    reason: str = ""


def run_probes(
    build: Build,
    instance: Instance,
    plan: Plan,
    settings: JudgeSettings,
    tests: Iterable[str],
    draw: int = 0,
    with_expected: bool = False,
    leaks: Mapping[int, Collection[str]] | None = None,
    watch_generators: bool = False,
) -> ProbeRun:
    """Run the probes of `tests` on a tree; with `with_expected`, they also report what the tests expect.

    `leaks` has values by probe: those that the probe's callers hold are reported as seen. With `watch_generators`,
    reports say whether random numbers were drawn.
    """
    with scratch_tree() as tree:
        build(tree)
        files = probe_files(tree, lambda path: is_protected(path, instance), plan.packages, draw, with_expected)
        for path, text in files.texts.items():
            (tree / path).write_text(text, encoding="utf-8")
        places = {test: plan.places[test] for test in tests if test in plan.places}
        own = {(files.renamed(function), index): test for test, (function, index) in places.items()}
        kinds = {number: probe.operator for number, probe in files.probes.items()}
        job = {
            "wanted": list(own),
            "truths": [n for n, kind in kinds.items() if kind in TRUTHS],
            "values": [n for n, kind in kinds.items() if kind not in (*TRUTHS, "none")],
            "watch_generators": watch_generators,
            "leaks": {str(number): list(values) for number, values in (leaks or {}).items()},
        }
        # Other seeds each time: what a set prints must not matter.
        seed = random.SystemRandom().randrange(1, 1000)
        outcome = run_pytest(tree, files_of(tree, places), job, settings, seed)
    if outcome.stopped:
        return ProbeRun(files.probes, reason=f"the tests were stopped by their {outcome.stopped} limit")
    reports: dict[tuple[str, int], list[Report]] = {}
    try:
        for line in outcome.report.splitlines():
            record = json.loads(line)
            function, index = record["test"] or ("", 0)
            if (function, index) in own:
                reports.setdefault((own[function, index], int(record["probe"])), []).append(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # A line that is not one of ours spoils the whole report.
        return ProbeRun(files.probes, reason="the report of the probes was tampered with")
    return ProbeRun(files.probes, reports)


@dataclass(frozen=True)
class Verdict:
    """Whether the task is solved, the share of tests of each kind that passed, and why not more."""

    solved: bool
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""
    outcomes: Mapping[str, str] = field(default_factory=dict)

    @property
    def progression(self) -> float:
        """0..1; a product, so that doing nothing is worth nothing although most tests are green from the start."""
        return self.fail_to_pass * self.pass_to_pass


def evaluate(instance: Instance, pristine: Path, tree: Path, settings: JudgeSettings, plan: Plan) -> Verdict:
    """Judge the agent's `tree`. What the agent did ends in a verdict, never in an error."""
    try:
        build = counted_changes(tree, pristine, instance)
    except TooMuchChanged as error:
        return Verdict(False, reason=str(error))
    wrong, reason = _wrong_tests(instance, settings, plan, build)
    if reason:
        return Verdict(False, reason=reason)
    if not wrong:
        run = run_tests(build, instance.required, settings)
        return Verdict(False, reason=run.reason) if run.reason else _verdict(instance, run.green, run.outcomes)
    # Of a tree with wrong probes, readable tests run; a hidden one counts if all its probes are right.
    readable = [test for test in instance.required if is_readable(test, instance, pristine)]
    green = {one.test for one in plan.expected}.difference(readable)
    run = TestRun()
    if readable:
        run = run_tests(counted_changes(tree, pristine, instance, hidden=False), readable, settings)
        if run.reason:
            return Verdict(False, reason=run.reason)
    verdict = _verdict(instance, (run.green | green) - wrong, run.outcomes)
    clue = f"what {min(wrong)} calls returns something else where the expected value is not at hand"
    return replace(verdict, reason=f"{verdict.reason}; {clue}")


def _verdict(instance: Instance, green: Collection[str], outcomes: Mapping[str, str]) -> Verdict:
    red = [test for test in instance.required if test not in green]
    reason = f"{len(red)} of {len(instance.required)} required tests are not green, as {red[0]}" if red else ""
    tests = instance.fail_to_pass, instance.pass_to_pass
    fail, keep = (sum(test in green for test in some) / len(some) if some else 1.0 for some in tests)
    return Verdict(not red, fail, keep, reason, outcomes)


def _wrong_tests(instance: Instance, settings: JudgeSettings, plan: Plan, build: Build) -> tuple[frozenset[str], str]:
    """The tests with a wrong probe, or why the probes did not run.

    Code may be random, so probes get a second run. The better one counts as a whole: if each probe could choose, code
    that knows which run it is in would have two answers to each.
    """
    wrong, limits = frozenset[str](), settings.limits
    deadline = time.monotonic() + PROBES_TIME * limits.seconds
    for draw in sorted({one.draw for one in plan.expected}):
        expected = [one for one in plan.expected if one.draw == draw]
        tests = dict.fromkeys(one.test for one in expected)
        found = set(tests)
        for _ in range(2):
            seconds = min(limits.seconds, deadline - time.monotonic())
            if seconds <= 0:
                return wrong, "the time for judging was used up"
            timed = replace(settings, limits=replace(limits, seconds=seconds))
            run = run_probes(build, instance, plan, timed, tests, draw)
            if run.reason:
                return wrong, run.reason
            found = min(found, {one.test for one in expected if not one.fits(run.reports)}, key=len)
            if not found:
                break
        wrong |= found
    return wrong, ""
