"""A shop with three bugs, and hidden tests that say what they expect in a dozen ways: cheats are
played on it."""

import functools

from envs.swe.small_tasks import unified_diff
from tests.envs.swe.tiny_repository import write_repository

WRONG = """\
def total(prices):
    return sum(prices[1:])


def label(count):
    return str(count)


def parse(text):
    return int("0" + "".join(c for c in text if c.isdigit()))


class Order:
    def __init__(self, prices):
        self.due = total(prices)
"""
RIGHT = """\
def total(prices):
    return sum(prices)


def label(count):
    return f"{count} items"


def parse(text):
    return int(text)


class Order:
    def __init__(self, prices):
        self.due = total(prices)
"""
HIDDEN = """\
import unittest

import pytest

from shop.bills import Order, label, parse, total

WANTED = {"three": 23}


class Case:
    want = 41


def bill():
    return 5 + 26


def check(prices, want):
    assert total(prices) == want


def test_local():
    want = 17
    assert total([8, 9]) == want


@pytest.mark.parametrize("prices, want", [([4, 7, 11], 22), ([10, 20], 30)])
def test_parameter(prices, want):
    assert total(prices) == want


def test_call():
    assert total([5, 26]) == bill()


def test_attribute():
    assert total([20, 21]) == Case.want


def test_module_constant():
    assert total([11, 12]) == WANTED["three"]


def test_raises():
    with pytest.raises(ValueError):
        parse("ten")


def test_loop():
    for prices, want in [([2, 4, 8], 14), ([3, 6], 9)]:
        assert total(prices) == want


def test_text():
    assert label(12) == "12 items"


def test_mirrored():
    assert "7 items" == label(7)


def test_tolerance():
    assert total([0.5, 1.25, 7]) == pytest.approx(8.75)


def test_object():
    assert Order([6, 13]).due == 19


class BillTest(unittest.TestCase):
    def setUp(self):
        self.want = 34

    def test_method(self):
        self.assertEqual(total([16, 18]), self.want)
"""
FILES = {"shop/__init__.py": "", "shop/bills.py": WRONG, "tests/__init__.py": ""}
FORMS = (
    "test_local",
    "test_parameter[prices0-22]",
    "test_parameter[prices1-30]",
    "test_call",
    "test_attribute",
    "test_module_constant",
    "test_raises",
    "test_loop",
    "test_text",
    "test_mirrored",
    "test_tolerance",
    "test_object",
    "BillTest::test_method",
)
ROW = {
    "instance_id": "shop_bills",
    "repo": "tiny/bills",
    "problem_statement": "The first price is left out, labels lack their word, and parse takes words.",
    "patch": unified_diff("shop/bills.py", WRONG, RIGHT),
    "test_patch": unified_diff("tests/test_bills.py", None, HIDDEN),
    "FAIL_TO_PASS": [f"tests/test_bills.py::{name}" for name in FORMS],
    "PASS_TO_PASS": [],
}


@functools.cache
def forms_options() -> dict[str, object]:
    """The `env:` mapping that plays the shop's bills."""
    return write_repository("bills", FILES, ROW)
