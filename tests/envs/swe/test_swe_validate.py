"""Instances are checked before training."""

import json
from pathlib import Path

import pytest

from envs.swe import SWESettings
from envs.swe.small_tasks import unified_diff
from envs.swe.validate import validate_instances
from tests.envs.swe.tiny_repository import (
    DISCOUNT,
    FILES,
    TASK,
    needs_sandbox,
    tiny_instance,
    tiny_options,
    write_repository,
)

pytestmark = pytest.mark.usefixtures("few_runs")

WRONG = "def double(x):\n    return x\n"
PATCH = unified_diff(
    "shop/prices.py", FILES["shop/prices.py"], FILES["shop/prices.py"] + "\n# nothing\n"
)


def _check(tmp_path: Path, row: dict | None = None, **options: object) -> tuple[str, str]:
    """What is found about an instance: a problem, and a note."""
    needs_sandbox()
    (tmp_path / "rows.jsonl").write_text(json.dumps({**tiny_instance().row(), **(row or {})}))
    settings = SWESettings(
        **{**tiny_options(), "instances": str(tmp_path / "rows.jsonl"), **options}
    )
    (found,) = validate_instances(settings, [TASK])
    assert found.task == TASK
    return found.problem, found.note


def test_a_sound_instance_is_validated_with_the_time_of_a_verdict(tmp_path: Path) -> None:
    problem, note = _check(tmp_path)
    assert not problem and note.startswith("verdict in ")
    assert (
        "5 of 5 assertions probed, 3 with an answer that is absent where they run (60 %), 10 bits "
        "decide" in note
    )


@pytest.mark.slow
def test_where_the_reference_throws_dice_its_answers_to_other_arguments_do_not_count(
    tmp_path: Path,
) -> None:
    """Runs can agree by chance, and another solution may throw once more. NumPy may have any
    generator."""
    dice = (
        "import random\nimport numpy\n\nnumpy.random.set_bit_generator(numpy.random.PCG64())\n\n\n"
    )
    dice += "def total(prices):\n    random.shuffle(prices)\n    return sum(prices)\n"
    patch = unified_diff("shop/prices.py", FILES["shop/prices.py"], dice + DISCOUNT)
    problem, note = _check(tmp_path, {"patch": patch, "DRAW_ARGUMENTS": True})
    assert not problem and (
        "5 of 5 assertions probed, 3 with an answer that is absent where they run (60 %), 10 bits "
        "decide; "
        "hard-coded answers pass tests/test_prices.py::test_total" in note
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"patch": ""}, "it has no reference patch"),
        (
            {"patch": "--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-a\n+b\n"},
            "the reference patch does not apply",
        ),
        (
            {"patch": PATCH},
            "the reference patch is not paid: not green: tests/test_prices.py::test_total, tests/",
        ),
        (
            {"PASS_TO_PASS": ["tests/test_prices.py::test_gone"]},
            "the reference patch is not paid: unknown test ids: tests/test_prices.py::test_gone",
        ),
        (
            {"FAIL_TO_PASS": ["tests/test_prices.py::test_total_of_nothing"], "PASS_TO_PASS": []},
            "the untouched tree is paid",
        ),
        (
            {"test_patch": unified_diff("tests/test_hidden.py", None, "import nowhere\n")},
            "the reference patch is not paid: pytest cannot collect tests/test_hidden.py; "
            "unknown test ids: tests/test_hidden.py::test_generators",
        ),
        (
            {"test_patch": unified_diff("pytest.ini", None, "[pytest]\nminversion = 999\n")},
            "the reference patch is not paid: pytest could not run the tests (exit status 4): ",
        ),
    ],
)
def test_what_is_wrong_with_an_instance_is_named(tmp_path: Path, change: dict, part: str) -> None:
    assert part in _check(tmp_path, change)[0]


@pytest.mark.parametrize(
    ("test", "part"),
    [
        ("assert double(int('7')) != 10 - 3", "its probes ask for 1 bits in all, and 8 are needed"),
        pytest.param(
            "assert all(double(n) == m for n, m in [(2, 4)])",
            "no probe tells a solution from the unsolved tree in",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "four = 4\n    assert double(int(str(four))) == 8 and double(2) == four",
            "8 are needed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import pytest\n    pytest.raises(TypeError, double, None)\n    "
            "pytest.raises(TypeError, double, {})\n    pytest.raises(TypeError, double, set())\n "
            "   pytest.raises(TypeError, double, double)",
            "its probes ask for 2 bits in all",
            marks=pytest.mark.slow,
        ),
        (
            "if double(3) != 6:\n        raise AssertionError",
            "no probe tells a solution from the unsolved tree in",
        ),
    ],
    ids=[
        "one bit",
        "a comparison inside",
        "the answer is an argument elsewhere",
        "exceptions",
        "no assertion",
    ],
)
def test_an_instance_whose_probes_say_too_little_is_refused(test: str, part: str) -> None:
    needs_sandbox()
    row = {
        "instance_id": "double",
        "repo": "tiny/made",
        "problem_statement": "double it",
        "patch": unified_diff("double.py", WRONG, WRONG.replace("x\n", "2 * x\n")),
        "test_patch": unified_diff(
            "tests/test_double.py",
            None,
            f"from double import double\n\n\ndef test_double():\n    {test}\n",
        ),
        "FAIL_TO_PASS": ["tests/test_double.py::test_double"],
        "PASS_TO_PASS": [],
    }
    env = write_repository("made", {"double.py": WRONG, "tests/__init__.py": ""}, row)
    (found,) = validate_instances(SWESettings(**env), ["double"])
    assert part in found.problem
