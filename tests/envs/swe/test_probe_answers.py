"""An answer that code under test could find where probes run does not count, however the test holds
it."""

import pytest

from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.swe.small_tasks import unified_diff
from tests.envs.swe.tiny_repository import RIGHT, WRONG, needs_sandbox, write_repository

pytestmark = pytest.mark.usefixtures("few_runs")

HELPERS = "def made(*parts):\n    return int(''.join(parts))\n\n\nclass Known:\n    answer = made('8', '01', '1')\n"
HELD = """
import dataclasses
import functools
import types

import pytest

from shop import total
from tests.helpers import Known, made

CALLED = made("81", "07")
if CALLED:
    BELOW = CALLED + 6
GROWN = 8000
GROWN += 119
TABLE = {"deep": [{"er": (made("82", "13"),)}]}
TEXT = "the answer is " + str(made("82", "19"))
PARTIAL = functools.partial(made, answer=made("83", "03"))


@dataclasses.dataclass
class Case:
    prices: list
    want: int


class Slotted:
    __slots__ = ("want",)

    def __init__(self):
        self.want = made("83", "11")


SLOTTED = Slotted()


def by_default(want=made("84", "01")):
    return want


def closed(want):
    return lambda: want


CLOSED = closed(made("84", "09"))


@pytest.fixture
def space():
    return types.SimpleNamespace(prices=[8400, 17], want=made("84", "17"))


def test_call():
    assert total([8100, 7]) == CALLED


def test_below():
    assert total([8100, 13]) == BELOW


def test_grown():
    assert total([8100, 19]) == GROWN


def test_table():
    assert total([8200, 13]) == TABLE["deep"][0]["er"][0]


def test_partial():
    assert total([8300, 3]) == PARTIAL.keywords["answer"]


@pytest.mark.parametrize("case", [Case([8300, 7], made("83", "07"))])
def test_dataclass(case):
    assert total(case.prices) == case.want


def test_slots():
    assert total([8300, 11]) == SLOTTED.want


def test_default():
    assert total([8400, 1]) == by_default()


def test_closure():
    assert total([8400, 9]) == CLOSED()


def test_fixture(space):
    assert total(space.prices) == space.want


def test_class():
    assert total([8000, 11]) == Known.answer


def test_text():
    assert str(total([8200, 19])) == TEXT.split()[-1]


def test_literal_elsewhere():
    assert total([4000, 99]) == 4099


def test_other():
    assert total([4099, 1]) > 7


def test_document():
    assert total([7000, 700, 53]) == 7753
"""
FREE = "from shop import total\n\n\ndef test_free():\n    assert total([5000, 900, 17]) == 5917\n"
FILES = {
    "shop.py": WRONG,
    "tests/__init__.py": "",
    "README.md": "For example, 7000 + 700 + 53 is 7753.\n",
}


def _plan(fail: list[str]) -> str:
    needs_sandbox()
    patch = "".join(
        unified_diff(f"tests/{name}", None, text)
        for name, text in (("test_held.py", HELD), ("test_free.py", FREE), ("helpers.py", HELPERS))
    )
    row = {
        "instance_id": "held",
        "repo": "tiny/held",
        "problem_statement": "mend it",
        "patch": unified_diff("shop.py", WRONG, RIGHT),
        "test_patch": patch,
        "FAIL_TO_PASS": fail,
        "PASS_TO_PASS": [],
    }
    options = write_repository("held", FILES, row)
    env = build_env_from("envs.swe", {"task": "held", "seed": 0}, options)
    return env.prepare()[1].note


NAMES = [
    line.partition("(")[0].removeprefix("def ")
    for line in HELD.splitlines()
    if line.startswith("def test_")
]
NAMES.remove("test_other")


def test_an_answer_that_an_object_or_a_file_holds_is_not_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envs.swe.verdict.calibration._some", ", ".join)
    tests = [f"tests/test_held.py::{name}" for name in NAMES]
    tests = [f"{test}[case0]" if "dataclass" in test else test for test in tests]
    with pytest.raises(ConfigError) as raised:
        _plan([*tests, "tests/test_free.py::test_free"])
    named = str(raised.value)
    assert (
        "no probe tells a solution from the unsolved tree in" in named and "test_free" not in named
    )
    assert [test for test in tests if test not in named] == []


def test_the_share_of_absent_answers_is_told() -> None:
    note = _plan(["tests/test_free.py::test_free"])
    assert note.startswith(
        "1 of 1 assertions probed, 1 with an answer that is absent where they run (100 %)"
    )
