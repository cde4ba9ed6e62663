"""Mutants are wrong, rewritten originals are not, and nothing but their meaning tells them apart."""

from __future__ import annotations

import ast
import random
import textwrap
from typing import Any

import pytest

from envs.swe.verdict.counter_tests import TOSSES, CounterTests, Mutant, draw_round, draw_rounds, shuffled
from envs.swe.verdict.definitions import definitions
from envs.swe.verdict.mutation import KINDS, draw_change
from envs.swe.verdict.rewriting import names_in, rewrite, shuffle_definitions
from tests.envs.tiny_repository import tiny_instance

TESTS = {
    "an int": "def test():\n    assert len('abc') == 3\n",
    "a float": "def test():\n    assert abs(1 / 3 - 0.333) < 0.01\n",
    "a string": "def test():\n    word = 'ab'\n    assert word.upper() == 'AB'\n",
    "a list": "def test():\n    found = sorted([3, 1, 2])\n    assert found == [1, 2, 3]\n",
    "a dict": "def test():\n    assert dict(a=1) == {'a': 1}\n",
    "a bool": "def test():\n    assert (1 < 2) is True\n",
    "none": "def test():\n    assert {}.get(1) is None\n",
    "membership": "def test():\n    assert 2 in [1, 2]\n",
    "an exception": "import pytest\ndef test():\n    with pytest.raises(ValueError):\n        int('x')\n",
    "a caught exception": "def test():\n    try:\n        {}['a']\n    except KeyError:\n        return\n"
    "    assert False\n",
    "unittest": "import unittest\ndef test(self=unittest.TestCase()):\n    self.assertEqual(sum([1, 2]), 3)\n",
    "no assertion": "def test():\n    ''.join([])\n",
    "names of its own": "def test():\n    def inner(x):\n        y = x + 1\n        return y\n"
    "    y = [x for x in range(3)]\n    for x in y:\n        assert inner(x) == x + 1\n",
}


def _outcome(module: ast.Module) -> str:
    scope: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(module), "test", "exec"), scope)
    try:
        scope["test"]()  # type: ignore[operator]
    except BaseException as error:
        return type(error).__name__
    return "passed"


def _variant(text: str, kind: str, seed: int, mutated: bool, style: int) -> ast.Module | None:
    module = ast.parse(text)
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    change = draw_change(function, kind, seed)
    if change is None:
        return None
    rng = random.Random(style)
    change.apply(mutated, rng)
    rewrite(function, names_in(ast.parse(text)), rng)
    # As the judge does: what counts is the text.
    return ast.parse(ast.unparse(ast.fix_missing_locations(module)))


@pytest.mark.filterwarnings("ignore:.*with a literal:SyntaxWarning")
@pytest.mark.parametrize("name", TESTS)
def test_originals_pass_in_every_style_and_some_mutant_fails(name: str) -> None:
    failed = set()
    for kind in KINDS:
        for seed in range(12):
            for style in range(3):
                original = _variant(TESTS[name], kind, seed, False, style)
                mutant = _variant(TESTS[name], kind, seed, True, style)
                if original is None or mutant is None:
                    continue
                assert _outcome(original) == "passed", ast.unparse(original)
                if _outcome(mutant) != "passed":
                    failed.add(kind)
    assert "planted" in failed
    assert name in ("no assertion", "names of its own") or failed & {"value", "operator"}


def test_the_same_seed_gives_the_same_mutant() -> None:
    text = TESTS["a list"]
    for seed in range(20):
        first, second = (_variant(text, "value", seed, True, 3) for _ in range(2))
        assert first is not None and second is not None and ast.dump(first) == ast.dump(second)


def test_an_original_and_its_mutant_mention_the_same_constants() -> None:
    def constants(module: ast.Module | None) -> set[str]:
        assert module is not None
        return {repr(node.value) for node in ast.walk(module) if isinstance(node, ast.Constant)}

    for seed in range(20):
        for style in range(5):
            original, mutant = (_variant(TESTS["an int"], "value", seed, side, style) for side in (False, True))
            assert constants(original) == constants(mutant)


CONSTANTS = ["an int", "a string", "a bool", "none", "unittest"]


@pytest.mark.filterwarnings("ignore:.*with a literal:SyntaxWarning")
@pytest.mark.parametrize("name", CONSTANTS)
def test_the_last_constant_of_an_original_is_not_what_it_expects(name: str) -> None:
    """Code that returns the last constant of its caller fails originals, so that it is found out."""
    for seed in range(12):
        for style in range(20):
            change = draw_change(ast.parse(TESTS[name]).body[-1], "value", seed)  # type: ignore[arg-type]
            original = _variant(TESTS[name], "value", seed, False, style)
            assert change is not None and original is not None and isinstance(change.right, ast.Constant)
            scope: dict[str, Any] = {}
            exec(compile(original, "test", "exec"), scope)
            assert repr(scope["test"].__code__.co_consts[-1]) != repr(change.right.value), ast.unparse(original)


def _kinds_drawn(*mutants: Mutant) -> set[str]:
    name, ids = "t.py:1", ("t.py::test[1]", "t.py::test[2]")
    tests = CounterTests({name: ids}, {name: mutants})
    return {draw_round(tests, ids, {name: True}, random.Random(seed)).drawn[name][0].kind for seed in range(30)}


def test_a_changed_value_comes_before_a_changed_operator_and_a_planted_statement() -> None:
    """Code that returns what its caller expects fails a changed operator as asked, and would stay unnoticed."""
    first, both = ("t.py::test[1]",), ("t.py::test[1]", "t.py::test[2]")
    planted, operator, value = (Mutant(kind, 0, both) for kind in ("planted", "operator", "value"))
    assert _kinds_drawn(planted, operator, value, operator) == {"value"}
    assert _kinds_drawn(planted, operator) == {"operator"}
    assert _kinds_drawn(planted) == {"planted"}
    # No test may go without a mutant that makes it fail.
    assert _kinds_drawn(planted, operator, Mutant("value", 0, first)) == {"value", "operator"}


def test_two_rewritings_of_a_test_differ() -> None:
    texts = set()
    for style in range(20):
        module = _variant(TESTS["a string"], "value", 1, False, style)
        assert module is not None
        texts.add(ast.unparse(module))
    assert len(texts) > 15


def test_functions_that_look_at_their_own_variables_are_not_rewritten() -> None:
    text = "def test():\n    one = 1\n    assert locals() == {'one': 1}\n"
    module = ast.parse(text)
    rewrite(module.body[0], frozenset(), random.Random(0))  # type: ignore[arg-type]
    assert ast.unparse(module) == text.strip()


def test_only_definitions_that_nothing_refers_to_change_places() -> None:
    text = textwrap.dedent("""
        def test_a(): pass
        def test_b(): pass
        @mark
        def test_c(): pass
        def test_d(): pass
        test_e = test_d
        def test_f(): pass
    """)
    orders = set()
    for seed in range(30):
        module = ast.parse(text)
        names = definitions({"t.py": module}, [f"t.py::test_{letter}" for letter in "abcdf"])
        shuffle_definitions({"t.py": module}, names, random.Random(seed))
        orders.add("".join(node.name[-1] for node in module.body if isinstance(node, ast.FunctionDef)))
    assert len(orders) == 6 and all(order[2:4] == "cd" for order in orders)


def test_every_test_is_shown_both_ways_and_few_tests_are_asked_often() -> None:
    instance = tiny_instance()
    name = "tests/test_hidden.py:4"
    mutant = Mutant("value", 1, ("tests/test_hidden.py::test_generators",))
    tests = CounterTests({name: mutant.kills}, {name: (mutant,)})
    rounds = list(draw_rounds(tests, instance, random.Random(0)))
    assert len(rounds) == TOSSES
    assert {shown.drawn[name][1] for shown in rounds[:2]} == {True, False}
    assert all(set(shown.ids) == set(instance.required) for shown in rounds[:2])
    assert all(set(shown.ids) == set(instance.fail_to_pass) for shown in rounds[2:])


def test_random_orders_keep_files_and_classes_together() -> None:
    ids = [f"{file}.py::{group}::t{i}" for file in "ab" for group in "XY" for i in range(3)]
    orders = {shuffled(ids, random.Random(seed)) for seed in range(20)}
    assert len(orders) > 10
    for order in orders:
        groups = [test.rsplit("::", 1)[0] for test in order]
        assert len([g for i, g in enumerate(groups) if i == 0 or groups[i - 1] != g]) == 4
