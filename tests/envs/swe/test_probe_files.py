"""Probe files hold what tests do and nothing that they expect."""

import ast
from pathlib import Path

import pytest

from envs.swe.verdict.claims import Origins, claims_of
from envs.swe.verdict.probe_files import ProbeFiles, draw_literals, probe_files
from tests.envs.swe.forms_repository import HIDDEN

CLAIMS = {
    "assert f(1) == 2": ["f(1) == 2"],
    "assert 2 == f(1)": ["f(1) == 2"],
    "assert 3 < f(1)": ["f(1) > 3"],
    "assert 1 < f(1) < 4": ["f(1) > 1", "f(1) < 4"],
    "assert f(1) == 2 and not f(2)": ["f(1) == 2", "f(2) falsy None"],
    "assert not f(1) == 2": ["f(1) != 2"],
    "assert f(1) is None": ["f(1) is None"],
    "assert f(1) is x": ["f(1) is x truthy None"],
    "assert 'a' in f(1)": ["f(1) contains 'a'"],
    "assert f(1)": ["f(1) truthy None"],
    "assert x == 2": [],
    "assert f(1) == f(2)": ["(f(1), f(2)) none None"],
    "assert f(1) == self.want(2)": ["f(1) == self.want(2)"],
    "assert raises(ValueError, lambda: f(1))": ["f(1) raises (ValueError, None)"],
    "pytest.raises(ValueError, f, 1)": ["f(1) raises (ValueError, None)"],
    "self.assertEqual(2, f(1))": ["f(1) == 2"],
    "self.assertFalse(f(1))": ["f(1) falsy None"],
    "self.assertIsNone(f(1))": ["f(1) is None"],
    "self.assertAlmostEqual(f(1), 2.5)": ["f(1) nearly 2.5"],
    "self.assertRaises(KeyError, f, 1)": ["f(1) raises (KeyError, None)"],
    "with pytest.raises(ValueError, match='no'):\n    f(1)": ["f(1) raises (ValueError, 'no')"],
    "f(1)": None,
    "x = 1": None,
}


@pytest.mark.parametrize("text", CLAIMS)
def test_an_assertion_is_taken_apart(text: str) -> None:
    module = ast.parse("from shop import f\n")
    claims = claims_of(ast.parse(text).body[0], Origins(module, {"shop"}))
    if claims is None:
        assert CLAIMS[text] is None
        return
    found = []
    for claim in claims:
        observed = claim.observed if isinstance(claim.observed, list) else [claim.observed]
        expected = "None" if claim.expected is None else ast.unparse(claim.expected)
        found.append(f"{'; '.join(map(ast.unparse, observed))} {claim.operator} {expected}")
    assert found == CLAIMS[text]


def _probes(folder: Path, text: str, **options: bool | int) -> tuple[str, ProbeFiles]:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "shop").mkdir(exist_ok=True)
    (folder / "tests" / "test_it.py").write_text(text)
    files = probe_files(
        folder, lambda path: path.startswith("tests/"), frozenset({"shop"}), **options
    )  # pyright: ignore[reportArgumentType]
    return files.texts["tests/test_it.py"], files


def test_no_expected_value_or_exception_is_left(tmp_path: Path) -> None:
    text, files = _probes(tmp_path, HIDDEN)
    numbers = ("17", "22", "30", "26 + 5", " 41", "23", "14", "8.75", "19", "34")
    for expected in (*numbers, "12 items", "def bill", "ValueError"):
        assert expected not in text, expected
    for given in (
        "[8, 9]",
        "[4, 7, 11]",
        "[5, 26]",
        "'ten'",
        "label(12)",
        "Order([6, 13])",
        "[16, 18]",
    ):
        assert given in text, given
    assert (
        "test_local" not in text
        and files.renamed("tests/test_it.py::test_local") != "tests/test_it.py::test_local"
    )


def test_what_the_package_may_have_changed_stays(tmp_path: Path) -> None:
    text, _ = _probes(
        tmp_path,
        "from shop import fill\n\n\ndef test():\n    basket, want = {}, 1\n    other = 2\n    "
        "fill(basket)\n    assert basket == {'a': 1}\n",
    )
    assert "basket, want = ({}, 1)" in text and "other" not in text
    assert "\n    fill(basket)\n" in text and "probe(0, lambda: basket)" in text


def test_names_that_an_inner_function_counts_in_stay(tmp_path: Path) -> None:
    text, _ = _probes(
        tmp_path,
        "from shop import f\n\n\ndef test():\n    calls, want = 0, 3\n    count = 0\n    goal = 3\n"
        "    def call():\n        nonlocal count\n        count += 1\n    assert f(call) == goal\n",
    )
    compile(text, "text", "exec")
    assert "count = 0" in text and "goal" not in text


def test_a_generator_stays_one(tmp_path: Path) -> None:
    source = "from shop import f\n\n\ndef test():\n    def eat():\n        while True:\n            x = yield\n"
    assert "x = (yield)" in _probes(tmp_path, source + "    assert f(eat()) == 3\n")[0]


def test_both_versions_number_their_probes_alike(tmp_path: Path) -> None:
    observing, with_expected = (
        _probes(tmp_path, HIDDEN)[1],
        _probes(tmp_path, HIDDEN, with_expected=True)[1],
    )
    assert {n: p.operator for n, p in observing.probes.items()} == {
        n: p.operator for n, p in with_expected.probes.items()
    }


def test_statements_of_a_block_that_raises_run_in_a_function(tmp_path: Path) -> None:
    text, _ = _probes(
        tmp_path,
        "import pytest\nfrom shop import f\n\n\ndef test():\n    d = f()\n    with "
        "pytest.raises(KeyError) as caught:\n        del d['a']\n    assert 'a' in "
        "str(caught.value)\n",
    )
    assert "KeyError" not in text and "caught = probe(0, step_0)" in text


def test_drawn_literals_are_other_ones_equal_ones_stay_equal_and_a_seed_repeats_them() -> None:
    source = "def test():\n    assert f({'abc': 5}, 'abc', 5, 1, flag=True) == {}\n"
    drawn = []
    for seed in (1, 1, 2):
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef)
        draw_literals(function, seed)
        drawn.append([n.value for n in ast.walk(function) if isinstance(n, ast.Constant)])
    assert drawn[0] == drawn[1]
    numbers = [v for v in drawn[0] if type(v) is int]
    assert numbers.count(1) == 1 and 5 not in numbers and len(set(numbers)) == 2
    words = [v for v in drawn[0] if isinstance(v, str)]
    assert words[0] == words[1] != "abc" and True in drawn[0]


def test_a_file_that_is_not_python_comes_out_empty(tmp_path: Path) -> None:
    assert _probes(tmp_path, "def test(:\n")[0].strip() == "from swe_probe import probe"


def test_what_a_callback_asserts_is_not_claimed(tmp_path: Path) -> None:
    """The package decides how often it calls a callback, and in which order."""
    source = (
        "from shop import f\n\n\ndef test():\n    n, k = 3, 0\n    def numbers():\n        for i "
        "in range(9):\n            assert i <= n * k\n            assert f(i) == 7\n            "
        "yield i\n    assert f(numbers(), n) == 4\n"
    )
    text, files = _probes(tmp_path, source)
    assert [p.operator for p in files.probes.values() if p.operator != "none"] == ["=="]
    assert "7" not in text and "lambda: f(i)" in text
