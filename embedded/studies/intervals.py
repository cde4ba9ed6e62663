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
    for name in ("megatron", "matplotlib", "scipy"):
        if find_spec(name) is None:
            raise MissingDependencyError(
                f"a study needs the package {name}; install it with: pip install 'slime-verlog[embedded,studies]'"
            )


def interquartile_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The interquartile mean, and the ends of its 95 % percentile bootstrap interval.

    The method of Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021). A
    quarter of the values is left out at each end, rounded down, so that this is the mean of up to three values.
    """
    scores = np.asarray(values, dtype=float)
    draws = np.random.RandomState(0).randint(len(scores), size=(REPETITIONS, len(scores)))
    low, high = np.percentile(_middle_half(scores[draws]).mean(axis=1), [2.5, 97.5])
    return float(_middle_half(scores).mean()), float(low), float(high)


def _middle_half(scores: np.ndarray) -> np.ndarray:
    """The values between the quartiles, along the last axis."""
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut]


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
