"""`gae_form: compaction` computes GAE for each stretch as if it were an episode."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.turn_table import TurnRow
from tests.advantage.batches import FakeSample, in_float64, run, state, turn

DISCOUNTS: dict[str, float] = {"gamma_step": 0.99, "lambda_step": 0.95, "gamma_token": 0.9, "lambda_token": 0.5}


def test_an_episode_that_the_batch_cuts_is_paid_its_bootstrap_value() -> None:
    samples = in_float64([turn(0, 0, [0.6], moves=False), turn(0, 1, [0.4], 0.25), state(0, 2, 0.7)])
    found = run(samples, gae_form="compaction", kl_coef=0.0, **DISCOUNTS)
    after = 0.25 + 0.99 * 0.7 - 0.4
    assert torch.cat(found["advantages"][:2]).tolist() == pytest.approx([0.45 * (0.25 + 0.7 - 0.6), after])
    assert torch.cat(found["returns"][:2]).tolist() == pytest.approx([0.95, after + 0.4])


def test_the_length_adaptive_lambda_of_later_turns_counts() -> None:
    """1 - 1 / (1.5 n) is 2/3 for a turn of two tokens and 7/9 for one of three."""
    samples = stretch_of([(2, False), (2, True), (3, True)], random.Random(0))
    adaptive: dict[str, Any] = {**DISCOUNTS, "lambda_policy": "length_adaptive", "gamma_token": 1.0}
    alone = advantages(as_episodes(samples), slime_verlog_role="actor", **adaptive)
    found = advantages(samples, gae_form="compaction", slime_verlog_role="actor", **adaptive)
    assert found[0].tolist() == pytest.approx((alone[0] * (2 / 3) ** 2 * (7 / 9) ** 3).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_each_stretch_is_an_episode_of_its_own_that_ends_with_all_later_rewards(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 4), k % 3 < 2 or k == 8) for k in range(9)]
    samples = stretch_of(shapes, rng)
    found = advantages(samples, gae_form="compaction", **DISCOUNTS)
    alone = advantages(as_episodes(samples), **DISCOUNTS)
    last_of_stretch = 0
    for k in range(9):
        last_of_stretch = next((j for j in range(k, 9) if not shapes[j][1]), 8)
        later = sum(tokens for tokens, _ in shapes[last_of_stretch + 1 :])
        assert found[k].tolist() == pytest.approx((alone[k] * 0.45**later).tolist(), abs=1e-12)


def stretch_of(shapes: list[tuple[int, bool]], rng: random.Random) -> list[FakeSample]:
    """An episode whose turns have so many tokens, and after which the environment moves or does not."""
    samples = []
    for k, (tokens, moves) in enumerate(shapes):
        reward, values = rng.random() * moves, [rng.random() for _ in range(tokens)]
        samples.append(turn(0, k, values, reward, moves=moves, terminated=k == len(shapes) - 1))
    return in_float64(samples)


def as_episodes(samples: list[FakeSample]) -> list[FakeSample]:
    """Each stretch as a segment that terminates, its last turn with all later rewards."""
    rewards = [sample.row.turns[0].reward for sample in samples]
    result, segment, first = [], 0, 0
    for k, sample in enumerate(samples):
        span, ends = sample.row.turns[0], not sample.row.turns[0].moves
        if ends:
            span = replace(span, reward=sum(rewards[k:]), moves=True)
        row = TurnRow(segment, k - first, terminated=ends or sample.row.terminated, turns=(span,))
        result.append(replace(sample, row=row))
        segment, first = (segment + 1, k + 1) if ends else (segment, first)
    return result


def advantages(samples: list[FakeSample], **changes: Any) -> list[torch.Tensor]:
    return run(samples, kl_coef=0.0, **changes)["advantages"]
