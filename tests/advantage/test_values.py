"""What the hook measures on a critic's batch: numbers of unseen turns, by their place in the
episode."""

import random
from argparse import Namespace
from typing import Any

import pytest
import torch

from advantage.settings import ROLE
from advantage.turn_table import TurnKind
from advantage.values import take_metrics
from tests.advantage.batches import FakeSample, expected, make_args, make_samples, run, turn


def numbers(samples: list[FakeSample], args: Namespace) -> list[tuple[int, float, float]]:
    """Index, value and return of the first trained token of every trained turn, by the definition
    of GAE."""
    found = []
    for sample, (advantages, returns) in zip(samples, expected(samples, args), strict=True):
        for index, span in zip(sample.row.indices, sample.row.turns, strict=True):
            trained = [j for j in range(span.start, span.end) if sample.mask[j]]
            if trained and sample.row.kind is TurnKind.TURN:
                first = trained[0]
                found.append(
                    (index, float(returns[first] - advantages[first]), float(returns[first]))
                )
    return found


def explained(turns: list[tuple[int, float, float]]) -> float:
    errors = torch.tensor([returned - value for _, value, returned in turns], dtype=torch.float64)
    returns = torch.tensor([returned for *_, returned in turns], dtype=torch.float64)
    return float(1 - errors.var(correction=0) / returns.var(correction=0))


def measured(samples: list[FakeSample], **keys: Any) -> dict[str, float]:
    data = run(samples, kl_coef=0.0, **{ROLE: "critic"}, **keys)
    metrics = take_metrics(data)
    assert not take_metrics(data) and {"values", "returns", "advantages"} <= data.keys()
    return metrics


@pytest.mark.parametrize("seed", range(3))
def test_explained_variance_is_that_of_the_first_tokens_of_trained_turns(seed: int) -> None:
    samples = make_samples(random.Random(seed), 40)
    turns = numbers(samples, make_args(kl_coef=0.0))
    metrics = measured(samples)
    assert metrics["explained_variance"] == pytest.approx(explained(turns), abs=1e-5)
    indices = torch.tensor([float(index) for index, _, _ in turns])
    first, last = torch.quantile(indices, torch.tensor([0.1, 0.9])).tolist()
    early, late = [t for t in turns if t[0] <= first], [t for t in turns if t[0] >= last]
    assert metrics["explained_variance_first_tenth"] == pytest.approx(explained(early), abs=1e-5)
    assert metrics["explained_variance_last_tenth"] == pytest.approx(explained(late), abs=1e-5)
    returns = [t[2] for t in turns]
    assert (metrics["return_min"], metrics["return_max"]) == pytest.approx(
        (min(returns), max(returns)), abs=1e-5
    )
    inside = (returns[0] - 0.5, returns[0] + 0.5)
    share = sum(not inside[0] <= x <= inside[1] for x in returns) / len(returns)
    bins = {"value_loss": "hl_gauss", "value_range": list(inside)}
    assert measured(samples, **bins)["return_outside_share"] == pytest.approx(share, abs=1e-6)


def test_equal_returns_leave_nothing_to_explain() -> None:
    samples = [turn(k, 0, [0.5 * k], 0.25, terminated=True) for k in range(3)]
    assert measured(samples)["explained_variance"] == 0
