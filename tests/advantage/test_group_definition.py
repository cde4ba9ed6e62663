"""Estimators without a critic equal their definition, for incomplete episodes too.

tests/advantage/test_layouts.py checks the same over several ranks.
"""

import random
from collections import defaultdict
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from advantage.group import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data

ESTIMATORS = ("grpo", "rloo", "gigpo")
GAMMA = 0.9


def sample(row: TurnRow, tokens: int, trained: bool = True) -> FakeSample:
    return FakeSample(row, 3, [int(trained)] * tokens, torch.zeros(tokens), torch.zeros(tokens))


def episodes_of(rng: random.Random, count: int) -> list[list[FakeSample]]:
    """Window samples of whole and cut episodes in three groups; few rewards and anchors, so that many are equal."""
    found = []
    for segment in range(count):
        first = rng.choice([0, 0, 0, 4])
        turns, ending = rng.choice([1, 2, 5]), rng.choice(["terminated", "terminated", "truncated", "cut"])
        group = rng.randrange(3)
        episode = []
        for k in range(turns):
            tokens, last = rng.choice([1, 2, 7]), k == turns - 1
            reward, moves = rng.choice([-0.1, 0.0, 1.0]), rng.random() < 0.8
            span = TurnSpan(0, tokens, reward, anchor=rng.randrange(4) if moves else -1, moves=moves)
            flags = {"terminated": last and ending == "terminated", "truncated": last and ending == "truncated"}
            episode.append(sample(TurnRow(segment, first + k, turns=(span,), group=group, **flags), tokens))
        if ending == "cut":
            episode.append(sample(TurnRow(segment, first + turns, TurnKind.BOOTSTRAP), 1, trained=False))
        found.append(episode)
    return found


def by_definition(
    episodes: list[list[FakeSample]], estimator: str, discount: str = "step"
) -> dict[tuple[int, int], float]:
    """Advantage of every turn, by (segment, turn): loops over groups, exactly as the papers write it."""
    whole: dict[int, list[list[TurnRow]]] = defaultdict(list)
    scores = {}
    for episode in episodes:
        rows = [s.row for s in episode if s.row.kind is TurnKind.TURN]
        scores |= {(row.segment, row.first_turn): 0.0 for row in rows}
        if rows[0].first_turn == 0 and (rows[-1].terminated or rows[-1].truncated):
            whole[rows[0].group].append(rows)

    def to_go(rows: list[TurnRow], gamma: float = GAMMA) -> float:
        moved = list(accumulate((row.turns[0].moves for row in rows[:-1]), initial=0))
        return sum(gamma**n * row.turns[0].reward for n, row in zip(moved, rows, strict=True))

    episode_gamma = 1.0 if estimator == "gigpo" and discount == "step" else GAMMA
    relative = lambda x, others: (x - mean(others)) / (stdev(others) + 1e-6) if len(others) > 1 else 0.0
    for members in whole.values():
        returns = [to_go(rows, episode_gamma) for rows in members]
        states: dict[int, list[float]] = defaultdict(list)
        for rows in members:
            for k, row in enumerate(rows):
                states[row.turns[0].anchor].append(to_go(rows[k:]))
        for i, rows in enumerate(members):
            others = returns[:i] + returns[i + 1 :]
            if estimator == "rloo":
                score = returns[i] - mean(others) if others else 0.0
            else:
                score = relative(returns[i], returns)
            for k, row in enumerate(rows):
                compared = estimator == "gigpo" and row.turns[0].anchor >= 0
                state = relative(to_go(rows[k:]), states[row.turns[0].anchor]) if compared else 0.0
                scores[row.segment, row.first_turn] = score + state
    return scores


def computed(samples: list[FakeSample], estimator: str, **more: Any) -> dict[tuple[int, int], list[float]]:
    data = rollout_data(samples)
    args = make_args(kl_coef=0.0, gamma_step=GAMMA, group_estimator=estimator, n_samples_per_prompt=4, **more)
    compute_advantages(args, data)
    rows = zip(samples, data["advantages"], strict=True)
    return {(s.row.segment, s.row.first_turn): row.tolist() for s, row in rows if s.row.kind is TurnKind.TURN}


def check(found: dict[tuple[int, int], list[float]], wanted: dict[tuple[int, int], float]) -> None:
    for turn, row in found.items():
        assert row == pytest.approx([wanted[turn]] * len(row), abs=1e-5), turn


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("estimator", "discount"), [("grpo", "step"), ("rloo", "step"), ("gigpo", "step"), ("gigpo", "both")]
)
def test_every_batch_agrees_with_the_definition_in_any_order(estimator: str, discount: str, seed: int) -> None:
    rng = random.Random(seed)
    episodes = episodes_of(rng, 12)
    samples = [s for episode in episodes for s in episode]
    rng.shuffle(samples)
    found = computed(samples, estimator, gigpo_discount=discount)
    check(found, by_definition(episodes, estimator, discount))


def check_ranks_share(rank: int, world: int) -> None:
    """Each rank of a batch that is spread over `world` ranks, unevenly, computes its part of the whole."""
    episodes = episodes_of(random.Random(5), 12)
    samples = [s for episode in episodes for s in episode]
    random.Random(1).shuffle(samples)
    third = len(samples) // 3
    mine = samples[:third] if rank == 0 else samples[third + rank - 1 :: world - 1]
    for estimator in ESTIMATORS:
        check(computed(mine, estimator), by_definition(episodes, estimator))
