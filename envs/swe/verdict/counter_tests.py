"""Counter-tests: mutated copies of the required tests, which must fail wherever the originals pass.

Code that makes tests pass without solving the task makes wrong tests pass too. So a verdict runs rounds in which
every test is either the original or a mutant, by the toss of a coin that only the judge sees. Both are rewritten, and
stand in the same file under the same name.

`calibration.py` finds out, once per instance and with the reference solution, which mutants are valid.
"""

from __future__ import annotations

import ast
import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.errors import ConfigError
from envs.swe.instances import Instance
from envs.swe.sandbox.folders import process_folder, remove_tree
from envs.swe.verdict.changes import apply_changes, collect_changes, is_protected
from envs.swe.verdict.definitions import named_functions, parse_files
from envs.swe.verdict.mutation import KINDS, draw_change
from envs.swe.verdict.rewriting import names_in, rewrite, shuffle_definitions
from envs.swe.verdict.runs import JudgeSettings, TestRun, build_tree, run_tests

TOSSES = 8
"""Coins tossed for the tests that must turn green: guessing them all right has a chance of 1 in 2^8."""


@dataclass(frozen=True)
class Mutant:
    """One wrong version of a test function, and the tests that fail because of it."""

    kind: str
    seed: int
    kills: tuple[str, ...] = ()


@dataclass(frozen=True)
class CounterTests:
    """What validation found out about the required tests of one instance. Functions are named `path:line`."""

    functions: Mapping[str, tuple[str, ...]]
    """The tests that each function defines."""
    mutants: Mapping[str, tuple[Mutant, ...]]
    """The valid mutants of each function that has any."""
    as_written: frozenset[str] = frozenset()
    """Functions that do not pass when they are rewritten."""
    unsteady: frozenset[str] = frozenset()
    """Tests that do not pass in every order, or not beside failing ones; they count in the first run alone."""
    in_order: bool = True
    """Whether the tests pass in a random order."""

    @property
    def guarded(self) -> frozenset[str]:
        """Tests for which there is a mutant that fails."""
        return frozenset(test for mutants in self.mutants.values() for mutant in mutants for test in mutant.kills)


@dataclass(frozen=True)
class Round:
    """One run: the tests in their order, and the change drawn for each function, with the side that it shows."""

    ids: tuple[str, ...]
    drawn: Mapping[str, tuple[Mutant, bool]]
    seed: int

    @property
    def must_fail(self) -> frozenset[str]:
        """Tests whose mutant is shown."""
        return frozenset(t for mutant, mutated in self.drawn.values() if mutated for t in mutant.kills)


def counted_changes(tree: Path, pristine: Path, instance: Instance) -> Callable[[Path], None]:
    """A function that builds the judged tree: the pristine files, the tests' patch, and what counts of the changes.

    Raises:
        TooMuchChanged: the changes are more than any patch would be.
    """
    changes = collect_changes(tree, pristine)
    counted = {path: change for path, change in changes.items() if not is_protected(path, instance)}

    def build(target: Path) -> None:
        build_tree(target, pristine, instance.test_patch)
        apply_changes(target, counted)

    return build


def reference_tree(instance: Instance, pristine: Path) -> Callable[[Path], None]:
    """The judged tree of the reference solution, made as an agent's would be.

    Raises:
        ConfigError: there is no reference solution, or it does not apply.
    """
    with scratch_tree() as tree:
        build_reference(tree, pristine, instance)
        return counted_changes(tree, pristine, instance)


def build_reference(tree: Path, pristine: Path, instance: Instance) -> None:
    """Make the tree that an agent with the reference solution would leave behind.

    Raises:
        ConfigError: as `reference_tree`.
    """
    if not instance.patch.strip():
        raise ConfigError(f"{instance.instance_id}: it has no reference patch, so its tests cannot be validated")
    remove_tree(tree)
    try:
        build_tree(tree, pristine, instance.patch)
    except ConfigError as error:
        raise ConfigError(f"{instance.instance_id}: the reference patch does not apply: {error}") from error


@contextlib.contextmanager
def scratch_tree() -> Iterator[Path]:
    """A place for a tree, which is removed afterwards."""
    folder = process_folder().make()
    try:
        yield folder / "tree"
    finally:
        remove_tree(folder)


def write_variant(tree: Path, tests: CounterTests, shown: Round) -> None:
    """Put a round's versions of the tests that it runs into a judged tree."""
    asked = frozenset(shown.ids)
    names = [name for name, ids in tests.functions.items() if not asked.isdisjoint(ids)]
    modules = parse_files(tree, {_file_of(name) for name in names})
    functions, rng = named_functions(modules), random.Random(shown.seed)
    taken = {path: names_in(module) for path, module in modules.items()}
    for name in names:
        if name in shown.drawn:
            mutant, mutated = shown.drawn[name]
            change = draw_change(functions[name], mutant.kind, mutant.seed)
            if change is not None:
                change.apply(mutated, rng)
        if name not in tests.as_written:
            rewrite(functions[name], taken[_file_of(name)], rng)
    if tests.in_order:
        shuffle_definitions(modules, names, rng)
    for path, module in modules.items():
        text = ast.unparse(ast.fix_missing_locations(module))
        (tree / path).write_text(text + "\n", encoding="utf-8")


def _file_of(function: str) -> str:
    return function.rsplit(":", 1)[0]


def run_round(build: Callable[[Path], None], tests: CounterTests, shown: Round, settings: JudgeSettings) -> TestRun:
    """Run the required tests as the round shows them."""

    def varied(target: Path) -> None:
        build(target)
        write_variant(target, tests, shown)

    return run_tests(varied, shown.ids, settings, in_order=tests.in_order)


def draw_rounds(tests: CounterTests, instance: Instance, rng: random.Random) -> Iterator[Round]:
    """The rounds of one verdict: twice all tests, each as original and as mutant once, then those that decide.

    Tests that must turn green are few in some instances, so they are asked until `TOSSES` coins were tossed.
    """
    decisive = [name for name, mutants in tests.mutants.items() if _kills_any(mutants, instance.fail_to_pass)]
    tosses = {name: rng.random() < 0.5 for name in tests.mutants}
    yield draw_round(tests, instance.required, tosses, rng)
    yield draw_round(tests, instance.required, {name: not side for name, side in tosses.items()}, rng)
    for _ in range(-(-TOSSES // len(decisive)) - 2 if decisive else 0):
        tosses = {name: rng.random() < 0.5 for name in decisive}
        yield draw_round(tests, instance.fail_to_pass, tosses, rng)


def _kills_any(mutants: Iterable[Mutant], ids: Iterable[str]) -> bool:
    return not {test for mutant in mutants for test in mutant.kills}.isdisjoint(ids)


def draw_round(tests: CounterTests, ids: Iterable[str], tosses: Mapping[str, bool], rng: random.Random) -> Round:
    """A round in which the functions in `tosses` show a mutant where the coin says so."""
    drawn = {name: (rng.choice(_best(tests.mutants[name])), mutated) for name, mutated in tosses.items()}
    return Round(shuffled(ids, rng), drawn, rng.getrandbits(32))


def _best(mutants: tuple[Mutant, ...]) -> tuple[Mutant, ...]:
    """Mutants of the first kind in `KINDS`; those of a later kind only if they alone make some test fail.

    Code that returns whatever its caller expects passes a changed value, and is found out. It fails a changed operator
    as asked. A planted statement is recognised most easily.
    """
    best: list[Mutant] = []
    for kind in KINDS:
        covered = {test for mutant in best for test in mutant.kills}
        best += [mutant for mutant in mutants if mutant.kind == kind and not covered.issuperset(mutant.kills)]
    return tuple(best)


def shuffled(ids: Iterable[str], rng: random.Random) -> tuple[str, ...]:
    """Tests in a random order that keeps files and classes together, so that their fixtures are made once."""
    groups: dict[str, dict[str, list[str]]] = {}
    for test in ids:
        names = test.split("[", 1)[0].split("::")
        groups.setdefault(names[0], {}).setdefault("::".join(names[1:-1]) or test, []).append(test)
    order: list[str] = []
    for file in _mixed(groups, rng):
        for group in _mixed(groups[file], rng):
            order += _mixed(groups[file][group], rng)
    return tuple(order)


def _mixed(items: Iterable[str], rng: random.Random) -> list[str]:
    return sorted(items, key=lambda _: rng.random())


def shown_mutated(tests: CounterTests, shown: Round) -> frozenset[str]:
    """Every test of a function that the round shows mutated, whether or not the mutant makes it fail."""
    names = [name for name, (_, mutated) in shown.drawn.items() if mutated]
    return frozenset(test for name in names for test in tests.functions[name])


def wrong_answers(tests: CounterTests, shown: Round, run: TestRun) -> tuple[frozenset[str], frozenset[str]]:
    """Tests that did not end as the round asks: mutants that passed, and originals that did not."""
    originals = frozenset(shown.ids) - shown_mutated(tests, shown) - tests.unsteady
    return shown.must_fail & run.green, originals - run.green
