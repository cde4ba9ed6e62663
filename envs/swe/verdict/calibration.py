"""Finds the valid probes of an instance with its reference solution, once, and keeps them in the
cache folder.

A probe is valid if the reference reports what the test expects in several runs with other hash
seeds. It is decisive if the unsolved tree reports something else, and its expected value is absent
where it runs (see `_weigh`).
"""

import collections
import functools
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from envs.errors import ConfigError
from envs.swe.verdict import evaluate, trees
from envs.swe.verdict.encoding import loosely
from envs.swe.verdict.evaluate import Expected, Plan, ProbeRun, TestSettings, run_tests
from envs.swe.verdict.instances import Instance
from envs.swe.verdict.literals import Literals, literals_in
from envs.swe.verdict.probe_files import TRUTHS, Probe, top_level_names
from envs.swe.verdict.reports import NotCounted, ProbeRecord, TestRun
from envs.swe.verdict.values import EXCEPTION_BITS, bits

MIN_BITS = 8
"""Answers of all decisive probes of an instance together must be at least this long (see
`values.bits`)."""
FEW_BITS = 4
"""Answers shorter than this do not count alone: at least one decisive probe must ask for more."""
DRAWS = 2
"""Sets of other arguments for the tests that the agent could read."""
_RUNS = 5
"""Runs of the reference that must agree, for each set of arguments: code may be random."""


def load_plan(instance: Instance, pristine: Path, cache: Path, settings: TestSettings) -> Plan:
    """Return the plan from the cache, or make it; raises ConfigError if the reference solution is
    not paid."""
    sources = [
        path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
    ]
    key = json.dumps(
        [instance.row(), str(pristine), str(settings.python), settings.test_args, sources]
    )
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    return _load(instance, pristine, cache / "probes" / name, settings)


@functools.lru_cache(maxsize=64)
def _load(instance: Instance, pristine: Path, target: Path, settings: TestSettings) -> Plan:
    with trees.building(target) as scratch:
        if scratch is not None:
            made = _Calibration(instance, pristine, settings).plan()
            scratch.write_text(json.dumps(asdict(made), default=sorted), encoding="utf-8")
    return TypeAdapter(Plan).validate_python(json.loads(target.read_text(encoding="utf-8")))


def check_green(instance: Instance, run: TestRun) -> None:
    """Raise NotCounted, with what keeps them from it, if the required tests are not green."""
    unknown = [test for test in instance.required if test not in run.outcomes]
    red = [test for test in instance.required if test in run.outcomes and test not in run.green]
    parts = []
    if run.uncollectable:
        parts.append(f"pytest cannot collect {_some(run.uncollectable)}")
    if unknown:
        parts.append(f"unknown test ids: {_some(unknown)}")
    if red:
        parts.append(f"not green: {_some(red)}")
    if unknown or red:
        raise NotCounted("; ".join(parts))


def _some(names: Collection[str]) -> str:
    return ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Calibration:
    """Runs the probes of an instance with the reference solution and without, and keeps those that
    are valid."""

    def __init__(self, instance: Instance, pristine: Path, settings: TestSettings) -> None:
        self.instance = instance
        self.pristine = pristine
        self.settings = settings
        with trees.scratch_tree() as tree:
            trees.build_reference(tree, pristine, instance)
            changes = trees.counted_changes(tree, pristine, instance)
        self.reference = functools.partial(
            trees.build_tree, pristine=pristine, test_patch=instance.test_patch, changes=changes
        )
        self.bare = Plan((), {}, frozenset())
        """The plan without probes."""

    def plan(self) -> Plan:
        """Find the valid probes in up to 21 runs of tests; raises as `load_plan`."""
        name = self.instance.instance_id
        required = self.instance.required
        try:
            plain = run_tests(self.reference, required, self.settings)
            check_green(self.instance, plain)
        except NotCounted as error:
            raise ConfigError(f"{name}: the reference patch is not paid: {error}") from error
        places = dict[str, tuple[str, int]]()
        counts = collections.Counter[str]()
        for test in plain.collected:
            function = test.split("[", 1)[0]
            places[test] = function, counts[function]
            counts[function] += 1
        with trees.scratch_tree() as tree:
            self.reference(tree)
            self.bare = Plan((), places, top_level_names(tree))
        expected, reached = self._own(
            [test for test in required if plain.outcomes[test] == "passed"]
        )
        weights, absent = self._weigh(expected)
        # A probe that several tests run counts once, and so do the classes of all exceptions: one
        # class can inherit from all that are expected.
        by_number = {number: weight for (_, number), weight in weights.items()}
        raising = {one.number for one in expected if one.operator == "raises"} & by_number.keys()
        total = sum(by_number.values()) - EXCEPTION_BITS * max(len(raising) - 1, 0)
        decided = {test for test, _ in weights}
        why = ""
        if bare := [test for test in self.instance.fail_to_pass if test not in decided]:
            why = f"no probe tells a solution from the unsolved tree in {_some(bare)}, so code that fakes it is paid"
        elif total < MIN_BITS:
            why = f"its probes ask for {total} bits in all, and {MIN_BITS} are needed: answers can be guessed"
        elif max(by_number.values()) < FEW_BITS:
            why = f"none of its probes asks for {FEW_BITS} bits or more: answers such as True or 3 do not count alone"
        if why:
            raise ConfigError(f"{name}: {why}")
        own = {one.key for one in expected}
        drawn = list[Expected]()
        readable = [
            t
            for t in self.instance.fail_to_pass
            if trees.is_readable(t, self.instance, self.pristine)
        ]
        for draw in range(1, DRAWS + 1) if readable and self.instance.draw_arguments else ():
            drawn += self._drawn(readable, draw, own)
        hard_coded = [test for test in readable if test not in {one.test for one in drawn}]
        note = f"{len({one.number for one in expected})} of {reached} assertions probed, {len(absent)} with an answer "
        note += f"that is absent where they run ({100 * len(absent) // max(reached, 1)} %), {total} bits decide"
        note += f"; hard-coded answers pass {_some(hard_coded)}" if hard_coded else ""
        return replace(self.bare, expected=(*expected, *drawn), note=note)

    def _unsolved(self, tree: Path) -> None:
        trees.build_tree(tree, self.pristine, self.instance.test_patch)

    def _play(self, build: trees.Build, tests: Iterable[str], **options: Any) -> ProbeRun:
        try:
            return evaluate.run_probes(
                build, self.instance, self.bare, self.settings, tests, **options
            )
        except NotCounted as error:
            if build is self.reference:
                raise ConfigError(
                    f"{self.instance.instance_id}: its probes do not run: {error}"
                ) from error
            return ProbeRun({}, {})

    def _own(self, tests: Collection[str]) -> tuple[list[Expected], int]:
        """The valid probes with the tests' own arguments, and how many assertions the tests
        reach."""
        first, second = (self._play(self.reference, tests, with_expected=True) for _ in range(2))
        again = {one.key: one for one in _expectations(second)}
        expected = [one for one in _expectations(first) if again.get(one.key) == one]
        for _ in range(_RUNS):
            run = self._play(self.reference, tests)
            expected = [one for one in expected if one.fits(run.reports)]
        return expected, len({number for run in (first, second) for _, number in run.reports})

    def _weigh(self, expected: list[Expected]) -> tuple[dict[tuple[str, int], int], set[int]]:
        """The bits of the decisive probes, and the numbers of all whose answer is absent where they
        run.

        A probe is decisive if the unsolved tree reports something else, and its answer is absent:
        with the reference, no object that code under test can reach equals or holds it when the
        call is about to be made, and no file of the sandbox has it as a literal.
        """
        values: dict[int, list[str]] = {}
        for one in expected:
            values.setdefault(one.number, []).extend(map(loosely, one.values))
        tests = dict.fromkeys(one.test for one in expected)
        run = self._play(self.reference, tests, leaks=values)
        unsolved = self._play(self._unsolved, tests)
        written = self._literals()
        weights: dict[tuple[str, int], int] = {}
        absent: set[int] = set()
        for one in expected:
            probe = run.probes[one.number]
            held = set[str]().union(*(report.seen for report in run.reports.get(one.key, [])))
            # `True` and `[]` stand everywhere: the longest answer counts that stands nowhere.
            lengths = [
                bits(one.operator, value)
                for value in one.values
                if one.operator == "raises" or not (loosely(value) in held or written.holds(value))
            ]
            weight = int(not probe.compares) if one.operator in TRUTHS else max(lengths, default=0)
            if weight:
                absent.add(one.number)
            if weight and not one.fits(unsolved.reports):
                weights[one.key] = weight
        return weights, absent

    def _literals(self) -> Literals:
        """What the files of the sandbox hold in which the probes of an unsolved tree run."""
        with trees.scratch_tree() as tree:
            self._unsolved(tree)
            evaluate.write_probes(tree, self.instance, self.bare)
            return literals_in(tree)

    def _drawn(
        self, tests: Collection[str], draw: int, own: Collection[tuple[str, int]]
    ) -> list[Expected]:
        """Decisive probes with drawn arguments; what the reference reports is expected."""
        run = self._play(self.reference, tests, draw=draw)
        found = [
            _as_is(key, draw, run.probes[key[1]], reports)
            for key, reports in run.reports.items()
            if key in own
        ]
        expected = [one for one in found if one is not None]
        for _ in range(_RUNS - 1):
            run = self._play(self.reference, tests, draw=draw)
            expected = [one for one in expected if one.fits(run.reports)]
        unsolved = self._play(self._unsolved, tests, draw=draw)
        return [one for one in expected if not one.fits(unsolved.reports)]


def _expectations(run: ProbeRun) -> Iterable[Expected]:
    for (test, number), reports in run.reports.items():
        probe = run.probes[number]
        if probe.operator in TRUTHS:
            yield Expected(test, number, probe.operator, "", (None,) * len(reports))
        elif probe.operator != "none" and all(one.has("expected") for one in reports):
            yield Expected(
                test,
                number,
                probe.operator,
                probe.exception,
                tuple(one.expected for one in reports),
            )


def _as_is(
    key: tuple[str, int], draw: int, probe: Probe, reports: list[ProbeRecord]
) -> Expected | None:
    """What the reference reports, as an expectation; None where numbers were drawn: runs can agree
    by chance."""
    if any(not report.has("value") or report.drawn for report in reports):
        return None
    values = tuple(report.value for report in reports)
    if probe.operator in ("==", "nearly", "same items"):
        return Expected(*key, "redrawn", "", values, draw)
    if probe.operator in TRUTHS and len(set(values)) == 1:
        return Expected(*key, "truthy" if values[0] else "falsy", "", (None,) * len(values), draw)
    return None
