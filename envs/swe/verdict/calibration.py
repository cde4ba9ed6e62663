"""Finds the valid counter-tests of an instance with its reference solution, once, and keeps them in the cache folder.

A mutant that passes with the reference solution is dropped. A test that does not pass there when it is rewritten stays
as written, and one that does not pass beside failing tests counts in the first run of a verdict alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from envs.errors import ConfigError
from envs.swe.instances import Instance
from envs.swe.verdict.changes import is_protected
from envs.swe.verdict.counter_tests import (
    CounterTests,
    Mutant,
    Round,
    draw_round,
    reference_tree,
    run_round,
    scratch_tree,
    shuffled,
    wrong_answers,
)
from envs.swe.verdict.definitions import definitions, parse_tests
from envs.swe.verdict.pristine import building
from envs.swe.verdict.runs import JudgeSettings, TestRun, build_tree, run_tests

_TRIED = ("value", "value", "value", "value", "operator", "planted")
"""Kinds of mutants tried for each test, one validation run each."""
_SOURCES = ("counter_tests.py", "definitions.py", "mutation.py", "rewriting.py", "calibration.py")


def load_counter_tests(instance: Instance, pristine: Path, cache: Path, settings: JudgeSettings) -> CounterTests:
    """The instance's counter-tests from the cache; validated with the reference solution when first asked for.

    Raises:
        ConfigError: the reference solution is missing or is not paid, or no counter-test is valid.
    """
    sources = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SOURCES]
    key = json.dumps([instance.row(), str(pristine), str(settings.python), settings.test_args, sources])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    return _load(instance, pristine, cache / "counter-tests" / name, settings)


@functools.lru_cache(maxsize=64)
def _load(instance: Instance, pristine: Path, target: Path, settings: JudgeSettings) -> CounterTests:
    with building(target) as scratch:
        if scratch is not None:
            found = make_counter_tests(instance, pristine, settings, random.SystemRandom())
            scratch.write_text(json.dumps(asdict(found), default=sorted), encoding="utf-8")
    data = json.loads(target.read_text(encoding="utf-8"))
    mutants = {
        name: tuple(Mutant(m["kind"], m["seed"], tuple(m["kills"])) for m in several)
        for name, several in data["mutants"].items()
    }
    functions = {name: tuple(ids) for name, ids in data["functions"].items()}
    as_written, unsteady = frozenset(data["as_written"]), frozenset(data["unsteady"])
    return CounterTests(functions, mutants, as_written, unsteady, data["in_order"])


def make_counter_tests(instance: Instance, pristine: Path, settings: JudgeSettings, rng: random.Random) -> CounterTests:
    """Validate counter-tests with the reference solution; takes some ten runs of the required tests.

    Raises:
        ConfigError: as `load_counter_tests`.
    """
    found = _Calibration(instance, pristine, settings, rng).run()
    if found.guarded.isdisjoint(instance.fail_to_pass):
        raise ConfigError(
            f"{instance.instance_id}: no counter-test is valid, so its verdicts could not be trusted; none of "
            f"{', '.join(instance.fail_to_pass[:3])} is defined where its statements can be changed"
        )
    return found


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
    """Finds out, with the reference solution, which mutants fail and which rewritings pass."""

    instance: Instance
    pristine: Path
    settings: JudgeSettings
    rng: random.Random
    tests: CounterTests = field(init=False)

    def run(self) -> CounterTests:
        self.build = reference_tree(self.instance, self.pristine)
        plain = run_tests(self.build, self.instance.required, self.settings)
        if why := why_not_green(self.instance, plain):
            raise ConfigError(f"{self.instance.instance_id}: the reference patch is not paid: {why}")
        self.tests = CounterTests(self._functions(), {})
        self._check_rewriting()
        self._try_mutants({test for test, outcome in plain.outcomes.items() if outcome == "xfailed"})
        self._check_mixtures()
        return self.tests

    def _functions(self) -> Mapping[str, tuple[str, ...]]:
        """Functions in files that are judged as we have them."""
        with scratch_tree() as tree:
            build_tree(tree, self.pristine, self.instance.test_patch)
            found = definitions(parse_tests(tree, self.instance.required), self.instance.required)
        return {name: ids for name, ids in found.items() if is_protected(name.rsplit(":", 1)[0], self.instance)}

    def _play(self, drawn: Mapping[str, tuple[Mutant, bool]]) -> TestRun:
        ids = shuffled(self.instance.required, self.rng)
        return run_round(self.build, self.tests, Round(ids, drawn, self.rng.getrandbits(32)), self.settings)

    def _check_rewriting(self) -> None:
        """Leave alone what does not stand being rewritten, and keep pytest's order if a random one breaks tests."""
        if not (red := self._red(self._play({}))):
            return
        as_written = {name for name, ids in self.tests.functions.items() if not red.isdisjoint(ids)}
        self.tests = replace(self.tests, as_written=frozenset(as_written))
        if self._red(self._play({})):
            self.tests = replace(self.tests, in_order=False)
            self.tests = replace(self.tests, unsteady=self._red(self._play({})))

    def _red(self, run: TestRun) -> frozenset[str]:
        return frozenset(self.instance.required) - run.green

    def _try_mutants(self, xfailed: Collection[str]) -> None:
        valid: dict[str, list[Mutant]] = {}
        names = [n for n, ids in self.tests.functions.items() if not set(ids) & ({*xfailed} | self.tests.unsteady)]
        for kind in _TRIED:
            drawn = {name: (Mutant(kind, self.rng.getrandbits(32)), True) for name in names}
            outcomes = self._play(drawn).outcomes
            for name, (mutant, _) in drawn.items():
                kills = tuple(test for test in self.tests.functions[name] if outcomes.get(test) == "failed")
                if kills:
                    valid.setdefault(name, []).append(replace(mutant, kills=kills))
        self.tests = replace(self.tests, mutants={name: tuple(several) for name, several in valid.items()})

    def _check_mixtures(self) -> None:
        """Mix originals and mutants as a verdict does. A test that ends otherwise than asked depends on others'
        failures: it counts in the first run alone, and loses its mutants, which may have failed for that reason.
        """
        tosses = {name: self.rng.random() < 0.5 for name in self.tests.mutants}
        for side in (True, False):
            sides = {name: toss is side for name, toss in tosses.items() if name in self.tests.mutants}
            shown = draw_round(self.tests, self.instance.required, sides, self.rng)
            passed, failed = wrong_answers(self.tests, shown, run_round(self.build, self.tests, shown, self.settings))
            unsteady = self.tests.unsteady | passed | failed
            mutants = {
                name: several
                for name, several in self.tests.mutants.items()
                if unsteady.isdisjoint(self.tests.functions[name])
            }
            self.tests = replace(self.tests, mutants=mutants, unsteady=unsteady)
