"""`gae_form: compaction` computes GAE for each stretch as if it were an episode."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.advantage.batches import FakeSample, check_rows, in_float64, run, state, turn, turns_of
from tests.advantage.reference import brute_force

DISCOUNTS: dict[str, Any] = {
    "gamma_step": 0.99,
    "lambda_step": 0.95,
    "gamma_token": 0.9,
    "lambda_token": 0.5,
}
ADAPTIVE = {
    "lambda_policy": "length_adaptive",
    "lambda_policy_alpha": 1.5,
    "slime_verlog_role": "actor",
}


def test_an_episode_that_the_batch_cuts_is_paid_its_bootstrap_value() -> None:
    samples = in_float64(
        [turn(0, 0, [0.6], moves=False), turn(0, 1, [0.4], 0.25), state(0, 2, 0.7)]
    )
    found = run(samples, gae_form="compaction", kl_coef=0.0, **DISCOUNTS)
    after = 0.25 + 0.99 * 0.7 - 0.4
    assert torch.cat(found["advantages"][:2]).tolist() == pytest.approx(
        [0.45 * (0.25 + 0.7 - 0.6), after]
    )
    assert torch.cat(found["returns"][:2]).tolist() == pytest.approx([0.95, after + 0.4])


@pytest.mark.parametrize("keys", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("seed", range(10))
def test_each_stretch_is_an_episode_of_its_own_that_ends_with_all_later_rewards(
    seed: int, keys: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    drawn = []
    for k in range(9):
        moves = k % 3 < 2 or k == 8
        values = [rng.random() for _ in range(rng.randint(1, 4))]
        drawn.append(turn(0, k, values, rng.random() * moves, moves=moves, terminated=k == 8))
    samples = in_float64(drawn)
    data = run(samples, gae_form="compaction", kl_coef=0.0, **DISCOUNTS, **keys)
    check_rows(data["advantages"], by_definition(samples, is_adaptive=bool(keys)), atol=1e-12)


def by_definition(samples: Sequence[FakeSample], is_adaptive: bool) -> list[torch.Tensor]:
    """GAE inside each stretch, which its notes end, discounted by every token of later
    stretches."""
    inside = lambda tokens: (
        max(0.0, 1 - 1 / (1.5 * tokens)) if is_adaptive else DISCOUNTS["lambda_token"]
    )
    turns = turns_of(samples, kl_coef=0.0)
    rewards = [defined.reward for defined in turns.values()]
    stretches = dict(turns)
    for k, (place, defined) in enumerate(turns.items()):
        if not defined.moves:
            stretches[place] = replace(defined, reward=sum(rewards[k:]), following=None, moves=True)
    found = brute_force(stretches, **{**DISCOUNTS, "lambda_token": inside})
    rows: list[torch.Tensor] = []
    later = this_stretch = 1.0
    for place in sorted(turns, reverse=True):
        if not turns[place].moves:
            later, this_stretch = later * this_stretch, 1.0
        row = torch.tensor(found[place], dtype=torch.float64)
        rows.insert(0, later * row)
        this_stretch *= (DISCOUNTS["gamma_token"] * inside(len(row))) ** len(row)
    return rows
