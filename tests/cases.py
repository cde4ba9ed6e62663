"""Long lists of cases: a few run by default, one or two for each mechanism, and the others are
slow."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[ParameterSet]:
    """Parameters for all `cases`; those outside `quick` are slow."""
    listed = list(cases)
    assert all(case in listed for case in quick), [case for case in quick if case not in listed]
    return [_case((case,), case in quick) for case in listed]


def pairs(first: Iterable[Any], second: Sequence[Any]) -> list[ParameterSet]:
    """Parameters for all pairs. By default, just enough of them run to meet every value of both
    sides."""
    firsts = list(first)
    most, least = max(len(firsts), len(second)), min(len(firsts), len(second))
    quick = {(n % len(firsts), n % len(second)) for n in range(most)} if least else set()
    return [
        _case((a, b), (i, j) in quick) for i, a in enumerate(firsts) for j, b in enumerate(second)
    ]


def _case(values: tuple[Any, ...], quick: bool) -> ParameterSet:
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)
