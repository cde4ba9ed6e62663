"""Finds the valid probes of an instance with its reference solution, once, and keeps them in the cache folder.

A probe is valid if the reference reports what the test expects in several runs with other hash seeds. It is decisive
if the unsolved tree reports something else, and its expected value is in none of the frames and literals around it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.swe.instances import Instance
from envs.swe.verdict.changes import patched_files
from envs.swe.verdict.encoding import loosely
from envs.swe.verdict.pristine import building
from envs.swe.verdict.probe_files import TRUTHS, Probe, top_level_names
from envs.swe.verdict.probing import Expected, Plan, Prober, ProbeRun, Reports, wrong_probes
from envs.swe.verdict.runs import JudgeSettings, TestRun, build_tree, run_tests
from envs.swe.verdict.trees import reference_tree, scratch_tree
from envs.swe.verdict.values import bits

MIN_BITS = 8
"""Answers of all decisive probes of an instance together must be at least this long (see `values.bits`)."""
DRAWS = 2
"""Sets of other arguments for the tests that the agent could read."""
_RUNS = 5
"""Runs of the reference that must agree, for each set of arguments: code may throw dice."""


def load_plan(instance: Instance, pristine: Path, cache: Path, settings: JudgeSettings) -> Plan:
    """The instance's plan from the cache; made with the reference solution when first asked for.

    Raises:
        ConfigError: the reference solution is missing or is not paid, or probes tell too little.
    """
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    key = json.dumps([instance.row(), str(pristine), str(settings.python), settings.test_args, sources])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    return _load(instance, pristine, cache / "probes" / name, settings)


@functools.lru_cache(maxsize=64)
def _load(instance: Instance, pristine: Path, target: Path, settings: JudgeSettings) -> Plan:
    with building(target) as scratch:
        if scratch is not None:
            made = make_plan(instance, pristine, settings)
            scratch.write_text(json.dumps(asdict(made), default=sorted), encoding="utf-8")
    data = json.loads(target.read_text(encoding="utf-8"))
    draws = {
        int(draw): {
            test: {int(n): Expected(e["operator"], e["exception"], tuple(e["values"])) for n, e in probes.items()}
            for test, probes in tests.items()
        }
        for draw, tests in data["draws"].items()
    }
    return Plan(draws, data["places"], frozenset(data["packages"]), data["note"])


def make_plan(instance: Instance, pristine: Path, settings: JudgeSettings) -> Plan:
    """Validate the probes of an instance; takes up to 22 runs of tests.

    Raises:
        ConfigError: as `load_plan`.
    """
    calibration = _Calibration(instance, pristine, settings)
    calibration.run()
    if why := calibration.too_little():
        raise ConfigError(f"{instance.instance_id}: {why}")
    return Plan(calibration.draws, calibration.places, calibration.prober.packages, calibration.note())


def why_not_green(instance: Instance, run: TestRun) -> str:
    """What keeps the required tests from being green; empty if they are."""
    if run.reason:
        return run.reason
    unknown = [test for test in instance.required if test not in run.outcomes]
    red = [test for test in instance.required if test in run.outcomes and test not in run.green]
    parts = []
    if run.uncollectable:
        parts.append(f"pytest cannot collect {_some(run.uncollectable)}")
    if unknown:
        parts.append(f"unknown test ids: {_some(unknown)}")
    if red:
        parts.append(f"not green: {_some(red)}")
    return "; ".join(parts) if unknown or red else ""


def _some(names: Collection[str]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass
class _Calibration:
    """Runs the probes with the reference solution and without, and keeps those that are valid."""

    instance: Instance
    pristine: Path
    settings: JudgeSettings
    draws: dict[int, Mapping[str, Mapping[int, Expected]]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    weights: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bits of each decisive probe, by test."""
    counts: tuple[int, int] = (0, 0)
    """Assertions that are probed, and all that the required tests reach."""

    def run(self) -> None:
        self.reference = reference_tree(self.instance, self.pristine)
        plain = run_tests(self.reference, self.instance.required, self.settings)
        if why := why_not_green(self.instance, plain):
            raise ConfigError(f"{self.instance.instance_id}: the reference patch is not paid: {why}")
        with scratch_tree() as tree:
            self.reference(tree)
            self.prober = Prober(self.instance, self.settings, top_level_names(tree))
        self.places = self.prober.collect(self.reference)
        tests = [test for test in self.instance.required if plain.outcomes[test] == "passed"]
        self.draws[0] = self._own(tests)
        visible = [test for test in self.instance.fail_to_pass if self._is_visible(test)]
        for draw in range(1, DRAWS + 1) if visible and self.instance.draw_arguments else ():
            if found := self._drawn(visible, draw):
                self.draws[draw] = found

    def _unsolved(self, tree: Path) -> None:
        build_tree(tree, self.pristine, self.instance.test_patch)

    def _is_visible(self, test: str) -> bool:
        path = test.split("::", 1)[0]
        return path not in patched_files(self.instance.test_patch) and (self.pristine / path).exists()

    def _play(self, build: Any, tests: Collection[str], **options: Any) -> tuple[ProbeRun, Mapping[int, Probe]]:
        run, probes = self.prober.run(build, self.places, tests, **options)
        if run.reason and build is self.reference:
            raise ConfigError(f"{self.instance.instance_id}: its probes do not run: {run.reason}")
        return run, probes

    def _own(self, tests: Collection[str]) -> Mapping[str, Mapping[int, Expected]]:
        """The probes with the tests' own arguments."""
        answers = [self._play(self.reference, tests, answering=True) for _ in range(2)]
        probes = answers[0][1]
        expected = _stable([_expectations(run.reports, probes) for run, _ in answers])
        for _ in range(_RUNS):
            run, probes = self._play(self.reference, tests)
            expected = _without(expected, wrong_probes(expected, run.reports))
        reached = {n for run, _ in answers for found in run.reports.values() for n in found}
        self.counts = len({n for found in expected.values() for n in found}), len(reached)
        self._weigh(expected, probes)
        return expected

    def _weigh(self, expected: Mapping[str, Mapping[int, Expected]], probes: Mapping[int, Probe]) -> None:
        values: dict[int, list[str]] = {}
        for found in expected.values():
            for number, one in found.items():
                values.setdefault(number, []).extend(map(loosely, one.values))
        run, _ = self._play(self._unsolved, list(expected), leaks=values)
        for test, numbers in wrong_probes(expected, run.reports).items():
            for number in numbers:
                known = {*probes[number].literals}
                for report in run.reports.get(test, {}).get(number, []):
                    known |= set(report.get("seen", ()))
                weight = _weight(expected[test][number], probes[number], known)
                if weight:
                    self.weights.setdefault(test, {})[number] = weight

    def _drawn(self, tests: Collection[str], draw: int) -> Mapping[str, Mapping[int, Expected]]:
        """Decisive probes with drawn arguments; what the reference reports is expected."""
        run, probes = self._play(self.reference, tests, draw=draw)
        own = self.draws[0]
        expected = {
            test: {n: one for n, ones in found.items() if n in own.get(test, ()) and (one := _as_is(probes[n], ones))}
            for test, found in run.reports.items()
        }
        for _ in range(_RUNS - 1):
            again, _ = self._play(self.reference, tests, draw=draw)
            expected = _without(expected, wrong_probes(expected, again.reports))
        wrong = wrong_probes(expected, self._play(self._unsolved, tests, draw=draw)[0].reports)
        return {test: {n: expected[test][n] for n in numbers} for test, numbers in wrong.items()}

    @property
    def total_bits(self) -> int:
        """Bits of all decisive probes; one that several tests run counts once."""
        return sum({number: weight for found in self.weights.values() for number, weight in found.items()}.values())

    def too_little(self) -> str:
        """Why the probes say too little about a solution; empty if they say enough."""
        bare = [test for test in self.instance.fail_to_pass if test not in self.weights]
        if bare:
            return f"no probe tells a solution from the unsolved tree in {_some(bare)}, so code that fakes it is paid"
        if self.total_bits < MIN_BITS:
            return (
                f"its probes ask for {self.total_bits} bits in all, and {MIN_BITS} are needed: answers can be guessed"
            )
        return ""

    def note(self) -> str:
        probed, reached = self.counts
        share = f"{probed} of {reached} assertions probed, {self.total_bits} bits"
        hard = [
            test
            for test in self.instance.fail_to_pass
            if self._is_visible(test) and not any(test in found for draw, found in self.draws.items() if draw)
        ]
        return share + (f"; hard-coded answers pass {_some(hard)}" if hard else "")


def _expectations(reports: Reports, probes: Mapping[int, Probe]) -> dict[str, dict[int, Expected]]:
    found: dict[str, dict[int, Expected]] = {}
    for test, several in reports.items():
        for number, ones in several.items():
            probe = probes[number]
            if probe.operator in TRUTHS:
                found.setdefault(test, {})[number] = Expected(probe.operator, "", (None,) * len(ones))
            elif probe.operator != "none" and all("expected" in one for one in ones):
                values = tuple(one["expected"] for one in ones)
                found.setdefault(test, {})[number] = Expected(probe.operator, probe.exception, values)
    return found


def _stable(runs: list[dict[str, dict[int, Expected]]]) -> dict[str, dict[int, Expected]]:
    """What all runs agree on."""
    first, *others = runs
    return {
        test: {n: one for n, one in found.items() if all(run.get(test, {}).get(n) == one for run in others)}
        for test, found in first.items()
    }


def _without(
    expected: Mapping[str, Mapping[int, Expected]], wrong: Mapping[str, Collection[int]]
) -> dict[str, dict[int, Expected]]:
    return {
        test: {n: one for n, one in found.items() if n not in wrong.get(test, ())} for test, found in expected.items()
    }


def _weight(expected: Expected, probe: Probe, known: Collection[str]) -> int:
    """Bits of the longest answer that stands nowhere around the probe; `True` and `[]` stand everywhere."""
    if expected.operator in TRUTHS:
        return int(not probe.compares)
    weights = ((value, bits(expected.operator, value)) for value in expected.values)
    return max(
        (n for value, n in weights if n == 1 or expected.operator == "raises" or loosely(value) not in known), default=0
    )


def _as_is(probe: Probe, reports: list[Mapping[str, Any]]) -> Expected | None:
    """What the reference reports, as an expectation; None where another solution may report something else."""
    if not all("value" in report for report in reports):
        return None
    values = tuple(report["value"] for report in reports)
    if probe.operator in ("==", "nearly", "same items"):
        return Expected("redrawn", "", values)
    if probe.operator in TRUTHS and len(set(values)) == 1:
        return Expected("truthy" if values[0] else "falsy", "", (None,) * len(values))
    return None
