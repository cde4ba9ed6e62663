"""Compares the critic's values with the returns of turns that it has not trained on yet.

The numbers are those of each turn's first token, whose value is that of the state, and they cover
the turns of all ranks. Explained variance is 1 - Var(return - value) / Var(return): 1 for a perfect
critic, 0 for a constant, and below 0 for values that are worse than a constant. The returns are the
critic's own targets.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from advantage.exchange import BOOTSTRAP, UNTRAINED
from advantage.hl_gauss import HlGauss

EXPLAINED = "explained_variance"
OUTSIDE = "return_outside_share"
TENTH = 0.1
EQUAL = 1e-8
"""Returns with less variance than this are equal."""
METRICS_KEY = "critic_metrics"
"""Key of the critic's rollout data with the metrics of the batch, from the hook until the first
training step."""


def compare_values(
    flags: Tensor, index: Tensor, value: Tensor, advantage: Tensor, head: HlGauss | None
) -> dict[str, float]:
    """Compute the metrics of one batch from the turns of all ranks [T]; empty without trained
    turns.

    Args:
        flags: those of `turn_flags`, and `UNTRAINED`; bootstrap states and untrained turns do not
            count.
        index: the number of each turn in its episode.
        value: of each turn's first token.
        advantage: of the same token; the return is the sum of the two.
        head: the critic's, if it has bins.
    """
    counted = flags & (BOOTSTRAP | UNTRAINED) == 0
    index = index[counted]
    value = value[counted]
    advantage = advantage[counted]
    if not len(index):
        return {}
    returns = value + advantage
    early, late = torch.quantile(index, torch.tensor([TENTH, 1 - TENTH], dtype=index.dtype))
    parts = {
        "first_tenth": index <= early,
        "middle": (index > early) & (index < late),
        "last_tenth": index >= late,
    }
    metrics = {
        EXPLAINED: explained_variance(returns, advantage),
        "value_mean": value.mean(),
        "return_mean": returns.mean(),
        "return_rms": (returns**2).mean().sqrt(),
        "return_min": returns.min(),
        "return_max": returns.max(),
    }
    for name, part in parts.items():
        if part.sum() > 1:
            metrics[f"{EXPLAINED}_{name}"] = explained_variance(returns[part], advantage[part])
    if head is not None:
        metrics[OUTSIDE] = head.outside(returns).double().mean()
    return {name: float(metric) for name, metric in metrics.items()}


def take_metrics(data: MutableMapping[str, Any]) -> dict[str, float]:
    """Remove the metrics of `compare_values` from a rank's rollout data, and return them; empty
    without any."""
    return data.pop(METRICS_KEY, {})


def explained_variance(returns: Tensor, errors: Tensor) -> float:
    """Compute the share of the returns' variance that the errors [n] do not have."""
    variance, unexplained = (float(x.var(correction=0)) for x in (returns, errors))
    return explained_share(variance, unexplained)


def explained_share(variance: float, unexplained: float) -> float:
    """Compute 1 - unexplained / variance; 0 for equal returns, of which nothing can be explained."""
    return 1 - unexplained / variance if variance > EQUAL else 0.0
