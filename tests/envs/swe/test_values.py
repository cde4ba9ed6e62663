"""What probes report is compared as the test would, and a report can be nothing but plain data."""

import collections
import json
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from envs.swe.sandbox.supervise import Outcome
from envs.swe.verdict import values
from envs.swe.verdict.encoding import encode, loosely
from envs.swe.verdict.reports import NotCounted, ProbeRecord, read_records
from envs.swe.verdict.values import Approx, Opaque, Unreadable, bits, decode, expectation, fits


def told(**fields: Any) -> ProbeRecord:
    return ProbeRecord(probe=0, test=None, **fields)


PLAIN = [
    None, True, 7, -(10**40), 1.5, float("inf"), 2j, "text \ud800", b"\x00\xff", (1, [2]), {3, 4}, frozenset(), ...,
    {"a": (1,), 2: None}, range(3), Decimal("1.10"), Fraction(2, 3), collections.deque([1]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_survive_the_way_out(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


class Own(list):
    def __iter__(self):
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_class_of_its_own_counts_as_what_it_is_made_of() -> None:
    assert decode(encode(Own([1, 2]))) == [1, 2] and decode(encode(Own([1, 2]))) != [3]
    assert decode(encode(collections.OrderedDict(a=1))) == {"a": 1}
    assert isinstance(decode(encode(object())), Opaque) and decode(encode(object())) != object()
    endless: list[Any] = []
    endless.append(endless)
    assert encode(endless) == encode(10**6000) == encode(Fraction(1, 7**9000)) == ["opaque"]
    assert encode(range(10**12)) == ["range", 0, 10**12, 1]


FITS = [
    ("==", 3, 3.0, True),
    ("==", Fraction(7), 7, True),
    ("is", numpy.True_, True, True),
    ("==", collections.UserString("ab"), "ab", True),
    ("==", 3, 4, False),
    ("!=", object(), 4, False),
    ("<", "a", 4, False),
    ("in", 3, [3, 4], True),
    ("not in", object(), [3], False),
    ("is", 0, None, False),
    ("same items", [2, 1], [1, 2], True),
    ("nearly", 1.00000001, 1.0, True),
    ("redrawn", [0.1 + 0.2], [0.3], True),
    ("redrawn", [0.31], [0.3], False),
    ("==", 8.750000001, pytest.approx(8.75), True),
    ("==", 8.76, pytest.approx(8.75), False),
    ("truthy", True, None, True),
    ("falsy", True, None, False),
]


@pytest.mark.parametrize(("how", "reported", "expected", "right"), FITS)
def test_reports_are_compared_as_the_assertion_does(
    how: str, reported: Any, expected: Any, right: bool
) -> None:
    assert fits(how, "", told(value=encode(reported)), encode(expected)) is right


def test_an_exception_fits_by_its_bases_by_the_tests_name_and_by_its_message() -> None:
    report = told(raised=["shop.core.NoPrice", "NoPrice", "builtins.ValueError"], message="no 7")
    for expected, name, pattern, right in [
        (ValueError, "ValueError", None, True),
        (KeyError, "KeyError", None, False),
        ((KeyError, ValueError), "(KeyError, ValueError)", None, True),
        (ValueError, "ValueError", r"no \d", True),
        (ValueError, "ValueError", "yes", False),
        (type("NoPrice", (Exception,), {"__module__": "shop.errors"}), "NoPrice", None, True),
    ]:
        assert fits("raises", name, report, encode((expected, pattern))) is right
    assert not fits("raises", "ValueError", told(value=3), encode((ValueError, None)))
    assert not fits("==", "", report, encode(3))


def test_a_message_that_takes_a_pattern_for_ever_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "_SEARCH_S", 0.5)
    report = told(raised=["builtins.ValueError"], message="a" * 1000 + "!")
    assert not fits("raises", "ValueError", report, encode((ValueError, r"(a+)+$")))


@pytest.mark.parametrize(
    "forged",
    [
        ["approx", ["int", "0x1"], ["float", "0x1p+1000"], None],
        ["no such kind"],
        ["int", "eval('7')"],
        ["fraction", "0x1", "0x0"],
        ["fraction", "0x" + "f" * 5000, "0x3"],
        ["int", "0x" + "f" * 5000],
        ["decimal", "9" * 5000],
        ["set", [["list", []]]],
        ["dict", [[["list", []], 1]]],
        ["list", 7],
        {"py/object": "os.system"},
        7,
    ],
    ids=lambda forged: str(forged)[:30],
)
def test_a_report_that_the_encoder_does_not_write_is_unreadable(forged: Any) -> None:
    with pytest.raises(Unreadable):
        decode(forged)


def test_deep_and_huge_reports_end_in_a_refusal() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = ["list", [deep]]
    with pytest.raises(Unreadable):
        decode(deep)
    assert not fits("==", "", told(value=["decimal", "1e999999999"]), encode(pytest.approx(2)))
    assert not fits("==", "", told(value=["int", "0x" + "f" * 4000]), encode(pytest.approx(2.5)))


COLLIDING = [hex(k * (2**61 - 1)) for k in range(20_000)]


@pytest.mark.parametrize(
    "forged",
    [
        ["set", [["int", number] for number in COLLIDING]],
        ["dict", [[["int", number], 0] for number in COLLIDING]],
    ],
)
def test_keys_that_were_chosen_to_collide_are_refused_at_once(forged: Any) -> None:
    began = time.process_time()
    with pytest.raises(Unreadable):
        decode(forged)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    "line",
    [
        b'{"probe": Infinity, "test": null}',
        b'{"probe": 1.5, "test": null}',
        b'{"probe": 0, "test": ["a", "b"]}',
        b'{"probe": 0, "test": null, "raised": [1]}',
        b'{"probe": 0, "test": null, "more": 1}',
        b"null",
        b"[" * 100_000,
        b"\xff",
    ],
    ids=range(8),
)
def test_a_line_that_is_no_record_is_tampered_with(line: bytes) -> None:
    report = b'{"probe": 0, "test": ["a", 0]}\n' + line
    with pytest.raises(NotCounted, match="tampered"):
        read_records(ProbeRecord, Outcome(0, "", report))


def test_only_an_expectation_can_be_a_tolerance() -> None:
    assert isinstance(expectation(encode(pytest.approx(2, abs=0.5))), Approx)
    assert expectation(encode(pytest.approx(2, abs=0.5))) == 2.4


def test_longer_answers_have_more_bits_and_values_made_from_each_other_are_alike() -> None:
    assert bits("truthy", None) == bits("==", encode(True)) == 1
    assert bits("==", encode(7)) == 4 < bits("==", encode(18)) < bits("==", encode("12 items"))
    assert bits("raises", encode((ValueError, None))) == 2
    assert loosely(encode([1, (2,)])) == loosely(encode((True, [2.0]))) != loosely(encode([1, 2]))
