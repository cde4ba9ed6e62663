"""Compares what a probe reported with what the reference solution makes the test expect, and weighs
the expectation.

Invariant: a report, which comes from untrusted code, is decoded into numbers, text and containers
of them only.
"""

import collections
import contextlib
import json
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from envs.swe.verdict.encoding import MAX_DIGITS
from envs.swe.verdict.reports import ProbeRecord

TOLERANCE = 1e-6
"""Relative difference of floats that is forgiven where the inputs were drawn, not written by the
tests' author."""
EXCEPTION_BITS = 2
MESSAGE_BITS = 4
MAX_BITS = 16
_SAME_HASH = 64
"""Keys of a set or mapping that may have the same hash by chance or because they are equal."""
_SEARCH_S = 5.0
_SEARCH = "import json, re, sys; how, flags, text = json.load(sys.stdin); sys.exit(not re.search(how, text, flags))"

_NUMBERS = (int, float, complex, Fraction, Decimal)


class Unreadable(Exception):
    """A report does not hold what the encoder writes."""


class Opaque:
    """A value that only its class knows; equal to nothing."""

    def __eq__(self, other: object) -> bool:
        return False


class Approx:
    """What `pytest.approx` and `assertAlmostEqual` expect."""

    def __init__(self, expected: Any, rel: float | None, absolute: float | None) -> None:
        if rel is None and absolute is not None:
            rel = 0.0
        self.expected = expected
        self.rel = TOLERANCE if rel is None else rel
        self.absolute = absolute or 1e-12

    def __eq__(self, other: object) -> bool:
        return nearly(other, self.expected, self.rel, self.absolute)


def nearly(one: Any, two: Any, rel: float, absolute: float = 0.0) -> bool:
    """Whether two values are equal but for small differences of the numbers in them."""
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(
            nearly(a, b, rel, absolute) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(
            nearly(one[key], two[key], rel, absolute) for key in two
        )
    if one == two:
        return True
    if isinstance(one, _NUMBERS) and isinstance(two, _NUMBERS):
        return abs(complex(one) - complex(two)) <= max(rel * abs(complex(two)), absolute)
    return False


def decode(encoded: Any) -> Any:
    """The value that `encode` wrote, which is plain data; raises Unreadable if it did not write
    this."""
    if encoded is None or isinstance(encoded, bool | str):
        return encoded
    try:
        kind, *parts = encoded
        return _PLAIN[kind](*parts)
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Unreadable(
            f"a report holds {type(encoded).__name__} that the encoder does not write"
        ) from error


def _all(parts: list[Any]) -> list[Any]:
    if not isinstance(parts, list):
        raise TypeError
    return [decode(part) for part in parts]


def _digits(text: Any) -> str:
    """Refuse numbers that are longer than the encoder writes them, before any arithmetic."""
    if not isinstance(text, str) or len(text) > MAX_DIGITS:
        raise ValueError
    return text


def _apart(keys: list[Any]) -> list[Any]:
    """Refuse keys that were chosen to have the same hash: a set of them takes the square of their
    number in time."""
    hashes = collections.Counter(map(hash, keys))
    if max(hashes.values(), default=0) > _SAME_HASH:
        raise ValueError
    return keys


_PLAIN: Mapping[str, Callable[..., Any]] = {
    "ellipsis": lambda: ...,
    "bytes": bytes.fromhex,
    "int": lambda text: int(_digits(text), 16),
    "float": lambda text: float.fromhex(_digits(text)),
    "complex": lambda *parts: complex(*(float.fromhex(_digits(part)) for part in parts)),
    "decimal": lambda text: Decimal(_digits(text)),
    "fraction": lambda *parts: Fraction(*(int(_digits(part), 16) for part in parts)),
    "type": lambda names: ("type", *map(str, names)),
    "range": lambda *ends: range(*map(operator.index, ends)),
    "tuple": lambda parts: tuple(_all(parts)),
    "list": _all,
    "deque": lambda parts: collections.deque(_all(parts)),
    "set": lambda parts: set(_apart(_all(parts))),
    "dict": lambda pairs: dict(
        zip(_apart(_all([key for key, _ in pairs])), _all([v for _, v in pairs]), strict=True)
    ),
    "opaque": Opaque,
}


def expectation(encoded: Any) -> Any:
    """As `decode`, for what the reference solution makes a test expect: a tolerance and a pattern
    have a meaning too.

    A report must not have it: a forged tolerance would be equal to everything.
    """
    match encoded:
        case ["approx", *parts]:
            return Approx(*map(decode, parts))
        case ["pattern", pattern, flags]:
            return re.compile(pattern, flags)
        case ["tuple", [kinds, pattern]]:
            return expectation(kinds), expectation(pattern)
    return decode(encoded)


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": lambda one, two: not isinstance(one, Opaque) and one != two,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda one, two: one in two,
    "not in": lambda one, two: not isinstance(one, Opaque) and one not in two,
    "is": operator.is_,
    "is not": lambda one, two: one is not two,
    "nearly": lambda one, two: nearly(one, two, 0.0, 5e-8),
    "redrawn": lambda one, two: nearly(one, two, TOLERANCE, 1e-12),
    "same items": lambda one, two: (
        len(one) == len(two) and all(list(one).count(x) == list(two).count(x) for x in two)
    ),
}
_TRUE = ("truthy", "contains")
_FALSE = ("falsy", "lacks")


def fits(how: str, exception: str, report: ProbeRecord, expected: Any) -> bool:
    """Whether a report is what the assertion accepts; `how` is its operator. Raises Unreadable as
    `decode`."""
    if how == "raises":
        # The exception must be of the reference's type, or of what the test calls by the same name.
        kinds, pattern = expectation(expected)
        wanted = set(re.findall(r"[\w.]+", exception))
        wanted |= {kind[1] for kind in ([kinds] if kinds and kinds[0] == "type" else kinds)}
        raised = report.raised
        message = report.message
        if raised is None or wanted.isdisjoint(raised):
            return False
        return pattern is None or (isinstance(message, str) and _is_found(pattern, message))
    if not report.has("value"):
        return False
    value = decode(report.value)
    if how in _TRUE or how in _FALSE:
        return value is (how in _TRUE)
    with contextlib.suppress(TypeError, ValueError, ArithmeticError, RecursionError):
        return bool(_OPERATORS[how](value, expectation(expected)))
    return False


def _is_found(pattern: str | re.Pattern[str], message: str) -> bool:
    """Search in a process that can be ended: untrusted code may choose a message that takes a
    pattern years."""
    compiled = re.compile(pattern)
    given = json.dumps([compiled.pattern, compiled.flags, message])
    argv = [sys.executable, "-I", "-S", "-c", _SEARCH]
    try:
        return (
            subprocess.run(
                argv, input=given, text=True, env={}, timeout=_SEARCH_S, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def bits(how: str, expected: Any) -> int:
    """Length of the expected value in a plain code: how much a guess has to hit.

    A yes or no is one bit, a number n takes its binary digits and a sign, a character three bits.
    It measures how much stands in an answer, not how likely a clever guess is.
    """
    if how == "raises":
        return EXCEPTION_BITS + (MESSAGE_BITS if expectation(expected)[1] is not None else 0)
    return (
        min(MAX_BITS, _bits(expectation(expected))) if how in ("==", "nearly", "same items") else 1
    )


def _bits(value: Any) -> int:
    if isinstance(value, Approx):
        return _bits(value.expected)
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() + 1
    if (
        isinstance(value, float | Decimal | Fraction)
        and math.isfinite(value)
        and value == int(value)
    ):
        return _bits(int(value))
    if isinstance(value, float | Decimal | Fraction | complex):
        return 8
    if isinstance(value, str | bytes):
        return 1 + 3 * len(value)
    if isinstance(value, dict):
        return 1 + sum(_bits(key) + _bits(part) for key, part in value.items())
    if isinstance(value, list | tuple | set | collections.deque):
        return 1 + sum(map(_bits, value))
    return 1
