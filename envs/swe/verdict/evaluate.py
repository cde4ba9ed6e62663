"""Decides whether a task is solved, outside the agent's sandbox.

1. The judged tree is built anew: the pristine files, the tests' patch, and of the agent's changes only those that are
   neither tests nor configure them.
2. The required tests run once, and all of them must be green.
3. Then they run in rounds in which every test is the original or a mutant (`counter_tests.py`): originals must pass,
   mutants must fail. Only the judge knows which is which, so code that passes every test is not
   rewarded, nor is code that guesses.

Limitation: if the agent can read the tests, code that hard-codes their expected values passes them. Hidden tests, in
`test_patch`, prevent this.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.swe.instances import Instance
from envs.swe.verdict.changes import TooMuchChanged
from envs.swe.verdict.counter_tests import (
    CounterTests,
    Round,
    counted_changes,
    draw_rounds,
    reference_tree,
    run_round,
    wrong_answers,
)
from envs.swe.verdict.runs import JudgeSettings, TestRun, run_tests

ROUNDS_TIME = 3
"""The rounds of one verdict together take no longer than this many times the limit of one run."""


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


def evaluate(
    instance: Instance,
    pristine: Path,
    tree: Path,
    settings: JudgeSettings,
    tests: CounterTests,
    shares_are_paid: bool = False,
) -> Verdict:
    """Judge the agent's `tree`. What the agent did ends in a verdict, never in an error.

    With `shares_are_paid`, the tests that pass in an unsolved tree are verified too.
    """
    try:
        build = counted_changes(tree, pristine, instance)
    except TooMuchChanged as error:
        return Verdict(False, reason=str(error))
    run = run_tests(build, instance.required, settings)
    if run.reason:
        return Verdict(False, reason=run.reason)
    solved = run.green.issuperset(instance.required)
    if not solved and not shares_are_paid:
        return _verdict(instance, run.green, run.outcomes)
    deadline = time.monotonic() + ROUNDS_TIME * settings.limits.seconds
    among = None if solved else run.green
    verification = _Verification(build, instance, pristine, settings, tests, among, deadline)
    try:
        wrong = verification.run()
    except _RoundBroke as error:
        return Verdict(False, reason=str(error))
    if solved and wrong:
        test = min(wrong)
        return Verdict(False, reason=f"{test} {wrong[test]}, so what it passes says nothing")
    return _verdict(instance, run.green - wrong.keys(), run.outcomes)


class _RoundBroke(Exception):
    """A round did not run to its end; the text says why."""


@dataclass(frozen=True)
class _Verification:
    """The rounds of one verdict. `among` are the tests to be verified in an unsolved tree, None in a solved one."""

    build: Callable[[Path], None]
    instance: Instance
    pristine: Path
    settings: JudgeSettings
    tests: CounterTests
    among: frozenset[str] | None
    deadline: float

    def run(self) -> Mapping[str, str]:
        """Tests that end otherwise than a round asks: those of the first such round, or all that are in `among`."""
        wrong: dict[str, str] = {}
        for shown in draw_rounds(self.tests, self.instance, random.SystemRandom()):
            found = self._play(shown)
            if self.among is None and found:
                return found
            wrong |= {test: why for test, why in found.items() if self.among is not None and test in self.among}
        return wrong

    def _play(self, shown: Round) -> Mapping[str, str]:
        run = self._run(self.build, shown)
        passed, failed = wrong_answers(self.tests, shown, run)
        if passed or failed:
            # A failing test can leave something behind for its neighbours. What the reference solution does in the
            # same round is held against no one.
            reference = self._run(reference_tree(self.instance, self.pristine), shown)
            passed, failed = passed - reference.green, failed & reference.green
        found = dict.fromkeys(passed, "passes in a version that must fail")
        return found | dict.fromkeys(failed, "fails when it says the same in other words")

    def _run(self, build: Callable[[Path], None], shown: Round) -> TestRun:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _RoundBroke("the time for judging was used up")
        limits = replace(self.settings.limits, seconds=min(self.settings.limits.seconds, left))
        run = run_round(build, self.tests, shown, replace(self.settings, limits=limits))
        if run.reason:
            raise _RoundBroke(run.reason)
        return run


def _verdict(instance: Instance, green: Collection[str], outcomes: Mapping[str, str]) -> Verdict:
    fail, keep = (_share(green, tests) for tests in (instance.fail_to_pass, instance.pass_to_pass))
    red = [test for test in instance.required if test not in green]
    reason = f"{len(red)} of {len(instance.required)} required tests are not green, as {red[0]}" if red else ""
    return Verdict(not red, fail, keep, reason, outcomes)


def _share(green: Collection[str], tests: Sequence[str]) -> float:
    return sum(test in green for test in tests) / len(tests) if tests else 1.0
