"""Interquartile means and their bootstrap intervals are those of the package rliable."""

from collections.abc import Sequence

import pytest

from embedded.studies.results import interquartile_mean

RECORDED = (
    ((0.2, 0.9), (0.55, 0.2, 0.9)),
    ((0.953125, 0.96875, 0.8359375), (0.9192708333333334, 0.8359375, 0.96875)),
    ((1.0, 2.0, 3.0, 4.0, 10.0), (3.0, 1.3333333333333333, 8.0)),
    ((0.346, 0.822, 0.33, -1.303, 0.905, 0.446, -0.537, 0.581), (0.42575, -0.32025, 0.728)),
    ((0.5, 0.5), (0.5, 0.5, 0.5)),
)
"""Values, and what rliable 1.2.0 returned for them after `numpy.random.seed(0)`, with 2,000
bootstrap samples."""


@pytest.mark.parametrize(("values", "expected"), RECORDED)
def test_the_intervals_are_those_of_rliable(
    values: Sequence[float], expected: tuple[float, float, float]
) -> None:
    assert interquartile_mean(values) == pytest.approx(expected, abs=1e-12)
