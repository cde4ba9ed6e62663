"""What the hook measures on a critic's batch: numbers of unseen turns, by their place in the episode."""

import random
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.hook import compute_advantages
from advantage.settings import ROLE
from advantage.turn_table import TurnKind
from advantage.values import take_metrics
from tests.advantage.batches import FakeSample, expected, make_args, make_samples, rollout_data


def numbers(samples: list[FakeSample], args: Namespace) -> list[tuple[int, float, float]]:
    """Index, value and return of the first trained token of every trained turn, by the definition of GAE."""
    found = []
    for sample, (advantages, returns) in zip(samples, expected(samples, args), strict=True):
        for index, turn in zip(sample.row.indices, sample.row.turns, strict=True):
            trained = [j for j in range(turn.start, turn.end) if sample.mask[j]]
            if trained and sample.row.kind is TurnKind.TURN:
                first = trained[0]
                found.append((index, float(returns[first] - advantages[first]), float(returns[first])))
    return found


def explained(turns: list[tuple[int, float, float]]) -> float:
    errors = torch.tensor([returned - value for _, value, returned in turns], dtype=torch.float64)
    returns = torch.tensor([returned for *_, returned in turns], dtype=torch.float64)
    return float(1 - errors.var(correction=0) / returns.var(correction=0))


def measured(samples: list[FakeSample], **keys: Any) -> dict[str, float]:
    args = make_args(kl_coef=0.0, **{ROLE: "critic"}, **keys)
    data = rollout_data(samples)
    compute_advantages(args, data)
    metrics = take_metrics(data)
    assert not take_metrics(data) and {"values", "returns", "advantages"} <= data.keys()
    return metrics


@pytest.mark.parametrize("seed", range(3))
def test_explained_variance_is_that_of_the_first_tokens_of_trained_turns(seed: int) -> None:
    samples = make_samples(random.Random(seed), 40)
    turns = numbers(samples, make_args(kl_coef=0.0))
    metrics = measured(samples)
    assert metrics["explained_variance"] == pytest.approx(explained(turns), abs=1e-5)
    quantiles = torch.quantile(torch.tensor([float(t[0]) for t in turns]), torch.tensor([0.1, 0.9])).tolist()
    early, late = ([t for t in turns if keep(t[0])] for keep in (quantiles[0].__ge__, quantiles[1].__le__))
    assert metrics["explained_variance_first_tenth"] == pytest.approx(explained(early), abs=1e-5)
    assert metrics["explained_variance_last_tenth"] == pytest.approx(explained(late), abs=1e-5)
    returns = [t[2] for t in turns]
    assert (metrics["return_min"], metrics["return_max"]) == pytest.approx((min(returns), max(returns)), abs=1e-5)
    inside = (returns[0] - 0.5, returns[0] + 0.5)
    share = sum(not inside[0] <= x <= inside[1] for x in returns) / len(returns)
    bins = {"value_loss": "hl_gauss", "value_range": list(inside)}
    assert measured(samples, **bins)["return_outside_share"] == pytest.approx(share, abs=1e-6)


def test_a_perfect_critic_explains_all_a_constant_nothing_and_equal_returns_have_nothing_to_explain() -> None:
    samples = [s for s in make_samples(random.Random(1), 30) if s.row.kind is TurnKind.TURN and s.row.terminated]
    alone = [s for s in samples if len(s.row.turns) == 1 and any(s.mask)]
    one_turn = [replace(s, row=replace(s.row, segment=k)) for k, s in enumerate(alone)]
    assert len(one_turn) > 2
    at = lambda level: [replace(s, values=torch.full_like(s.values, level(s))) for s in one_turn]
    assert measured(at(lambda s: s.row.turns[0].reward))["explained_variance"] == pytest.approx(1)
    assert measured(at(lambda s: 0.7))["explained_variance"] == pytest.approx(0, abs=1e-6)
    turns = lambda s: (replace(s.row.turns[0], reward=0.25),)
    equal = [replace(s, row=replace(s.row, turns=turns(s))) for s in one_turn]
    assert measured(equal)["explained_variance"] == 0
