"""Decides whether a task is solved, outside the agent's sandbox.

1. The judged tree is built anew: the pristine files, the tests' patch, and of the agent's changes only those that are
   neither tests nor configure them.
2. Probes run: copies of the required tests without anything that they expect (`probe_files.py`). What they report is
   compared outside of the sandbox. Code cannot read the answers there, because they are not there.
3. Then the required tests run, and all of them must be green. They come last, because code could remember what they
   expect; each run has a fresh sandbox.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.swe.instances import Instance
from envs.swe.verdict.changes import TooMuchChanged
from envs.swe.verdict.probing import Plan, Prober, wrong_probes
from envs.swe.verdict.runs import JudgeSettings, run_tests
from envs.swe.verdict.trees import Build, counted_changes

PROBES_TIME = 3
"""The probes of one verdict together take no longer than this many times the limit of one run."""


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
    wrong, reason = _run_probes(instance, settings, plan, build)
    if reason:
        return Verdict(False, reason=reason)
    run = run_tests(build, instance.required, settings)
    if run.reason:
        return Verdict(False, reason=run.reason)
    if wrong and run.green.issuperset(instance.required):
        reason = f"{min(wrong)} passes, but what it calls returns something else where the answer is not at hand"
    return _verdict(instance, run.green - wrong, run.outcomes, reason)


def _run_probes(instance: Instance, settings: JudgeSettings, plan: Plan, build: Build) -> tuple[frozenset[str], str]:
    """The tests with a wrong probe, or why the probes did not run. What is wrong once only was wrong by chance."""
    wrong, limits = frozenset[str](), settings.limits
    deadline = time.monotonic() + PROBES_TIME * limits.seconds
    for draw, expected in plan.draws.items():
        left = expected
        for _ in range(2):
            seconds = min(limits.seconds, deadline - time.monotonic())
            if seconds <= 0:
                return wrong, "the time for judging was used up"
            timed = replace(settings, limits=replace(limits, seconds=seconds))
            run, _ = Prober(instance, timed, plan.packages).run(build, plan.places, list(left), draw)
            if run.reason:
                return wrong, run.reason
            found = wrong_probes(left, run.reports)
            left = {test: {n: expected[test][n] for n in numbers} for test, numbers in found.items()}
            if not left:
                break
        wrong |= left.keys()
    return wrong, ""


def _verdict(instance: Instance, green: Collection[str], outcomes: Mapping[str, str], reason: str) -> Verdict:
    fail, keep = (_share(green, tests) for tests in (instance.fail_to_pass, instance.pass_to_pass))
    red = [test for test in instance.required if test not in green]
    if red and not reason:
        reason = f"{len(red)} of {len(instance.required)} required tests are not green, as {red[0]}"
    return Verdict(not red, fail, keep, reason, outcomes)


def _share(green: Collection[str], tests: Sequence[str]) -> float:
    return sum(test in green for test in tests) / len(tests) if tests else 1.0
