"""Means over seeds, with an interval that says how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from slime_verlog import MissingDependencyError

REPETITIONS = 2000
"""Bootstrap samples per interval."""


def require_packages() -> None:
    """Check that a study can train, and draw its plot and its intervals at the end.

    Raises:
        MissingDependencyError: a package is not installed.
    """
    for name in ("megatron", "matplotlib", "rliable"):
        if find_spec(name) is None:
            raise MissingDependencyError(
                f"a study needs the package {name}; install it with: pip install 'slime-verlog[embedded,studies]'"
            )


def interquartile_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The interquartile mean and the ends of its 95 % bootstrap interval, by the package rliable.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021). A quarter of
    the values is left out at each end, rounded down, so that this is the mean of up to three values.
    """
    from rliable import library, metrics

    scores = {"": np.asarray(values, dtype=float)[:, None]}
    mean_of = lambda sample: np.array([metrics.aggregate_iqm(sample)])
    state = np.random.get_state()
    np.random.seed(0)  # rliable draws from the process-wide generator, whatever generator it is given
    try:
        means, ends = library.get_interval_estimates(scores, mean_of, reps=REPETITIONS)
    finally:
        np.random.set_state(state)
    return float(means[""][0]), float(ends[""][0, 0]), float(ends[""][1, 0])


def iqm_cell(values: Sequence[float], form: str) -> str:
    """A table's cell: interquartile mean and interval."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "-"
    mean, low, high = interquartile_mean(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def mean_cell(values: Sequence[float], form: str) -> str:
    """A table's cell: mean ± standard error."""
    if not values:
        return "-"
    n, mean = len(values), sum(values) / len(values)
    error = (sum((value - mean) ** 2 for value in values) / (n - 1) / n) ** 0.5 if n > 1 else None
    return f"{mean:{form}}" + (f" ± {error:{form}}" if error is not None else "")
