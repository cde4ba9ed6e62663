"""Estimators without a critic equal their definition, for incomplete episodes too.

tests/advantage/test_layouts.py checks the same over several ranks.
"""

import random
from collections import defaultdict
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advantage.estimators import ESTIMATORS
from advantage.group import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data, sample_of, state

GAMMA, LAMBDA = 0.9, 0.7
Scores = dict[tuple[int, int], float]


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
            anchor, baseline = rng.randrange(4) if moves else -1, rng.random()
            span = TurnSpan(0, tokens, reward, anchor=anchor, moves=moves, baseline=baseline)
            flags = {"terminated": last and ending == "terminated", "truncated": last and ending == "truncated"}
            row = TurnRow(segment, first + k, turns=(span,), group=group, **flags)
            episode.append(sample_of(row, [1] * tokens))
        if ending == "cut":
            episode.append(state(segment, first + turns))
        found.append(episode)
    return found


def by_definition(episodes: list[list[FakeSample]], estimator: str, discount: str = "step") -> Scores:
    """Advantage of every turn, by (segment, turn): plain loops over groups, as the papers write it."""
    groups: dict[int, list[list[TurnRow]]] = defaultdict(list)
    scores: Scores = {}
    for episode in episodes:
        rows = [s.row for s in episode if s.row.kind is TurnKind.TURN]
        scores |= {name(row): 0.0 for row in rows}
        if rows[0].first_turn == 0 and (rows[-1].terminated or rows[-1].truncated):
            groups[rows[0].group].append(rows)
    for members in groups.values():
        if estimator == "rloo":
            scores |= by_rloo(members)
        elif estimator == "g2po":
            scores |= by_g2po(members)
        elif estimator == "gagpo":
            scores |= by_gagpo(members)
        elif estimator == "branches":
            for rows in members:
                scores |= {name(row): to_go(rows[t:]) - row.turns[0].baseline for t, row in enumerate(rows)}
        else:
            scores |= by_gigpo(members, estimator, discount)
    return scores


def name(row: TurnRow) -> tuple[int, int]:
    return row.segment, row.first_turn


def to_go(rows: list[TurnRow], gamma: float = GAMMA) -> float:
    moved = list(accumulate((row.turns[0].moves for row in rows[:-1]), initial=0))
    return sum(gamma**n * row.turns[0].reward for n, row in zip(moved, rows, strict=True))


def relative(x: float, others: list[float]) -> float:
    return (x - mean(others)) / (stdev(others) + 1e-6) if len(others) > 1 else 0.0


def state_of(row: TurnRow) -> object:
    return row.turns[0].anchor if row.turns[0].anchor >= 0 else name(row)


def by_rloo(members: list[list[TurnRow]]) -> Scores:
    scores, returns = {}, [to_go(rows) for rows in members]
    for i, rows in enumerate(members):
        others = returns[:i] + returns[i + 1 :]
        scores |= {name(row): returns[i] - mean(others) if others else 0.0 for row in rows}
    return scores


def by_gigpo(members: list[list[TurnRow]], estimator: str, discount: str) -> Scores:
    gamma = 1.0 if estimator == "gigpo" and discount == "step" else GAMMA
    returns, visits, scores = [to_go(rows, gamma) for rows in members], returns_of_states(members), {}
    for i, rows in enumerate(members):
        for t, row in enumerate(rows):
            of_turn = relative(to_go(rows[t:]), visits[state_of(row)]) if estimator == "gigpo" else 0.0
            scores[name(row)] = relative(returns[i], returns) + of_turn
    return scores


def returns_of_states(members: list[list[TurnRow]]) -> dict[object, list[float]]:
    visits: dict[object, list[float]] = defaultdict(list)
    for rows in members:
        for t, row in enumerate(rows):
            visits[state_of(row)].append(to_go(rows[t:]))
    return visits


def by_g2po(members: list[list[TurnRow]]) -> Scores:
    value = {state: GAMMA * mean(returns) for state, returns in returns_of_states(members).items()}
    returns, gains, reached_from = [], {}, defaultdict(dict)
    for rows in members:
        returns += [to_go(rows, 1.0)] * len(rows)
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            reached = row.turns[0].reward + (value[state_of(after)] if after else 0.0)
            reached_from[state_of(row)][name(row)] = reached
            gains[name(row)] = reached - value[state_of(row)]
    scores = {}
    for rows in members:
        for row in rows:
            choices = reached_from[state_of(row)]
            of_choice = relative(choices[name(row)], [*choices.values()])
            of_gain = relative(gains[name(row)], [*gains.values()])
            scores[name(row)] = relative(to_go(rows, 1.0), returns) + of_choice + of_gain
    return scores


def by_gagpo(members: list[list[TurnRow]]) -> Scores:
    value = {state: mean(returns) for state, returns in returns_of_states(members).items()}
    raw = {}
    for rows in members:
        after, advantage = 0.0, 0.0
        for row in reversed(rows):
            gamma, decay = (GAMMA, GAMMA * LAMBDA) if row.turns[0].moves else (1.0, 1.0)
            advantage = row.turns[0].reward + gamma * after - value[state_of(row)] + decay * advantage
            after = value[state_of(row)]
            raw[name(row)] = advantage
    return {turn: relative(advantage, [*raw.values()]) for turn, advantage in raw.items()}


def computed(samples: list[FakeSample], estimator: str, **more: Any) -> dict[tuple[int, int], list[float]]:
    data = rollout_data(samples)
    keys = {"gamma_step": GAMMA, "lambda_step": LAMBDA, "group_estimator": estimator, **more}
    compute_advantages(make_args(kl_coef=0.0, n_samples_per_prompt=4, **keys), data)
    rows = zip(samples, data["advantages"], strict=True)
    return {name(s.row): row.tolist() for s, row in rows if s.row.kind is TurnKind.TURN}


def check(found: dict[tuple[int, int], list[float]], wanted: dict[tuple[int, int], float]) -> None:
    for turn, row in found.items():
        assert row == pytest.approx([wanted[turn]] * len(row), abs=1e-5), turn


@pytest.mark.parametrize(
    ("estimator", "discount"), [*((estimator, "step") for estimator in ESTIMATORS), ("gigpo", "both")]
)
@given(rng=st.randoms(use_true_random=False))
def test_every_batch_agrees_with_the_definition_in_any_order(estimator: str, discount: str, rng: random.Random) -> None:
    episodes = episodes_of(rng, rng.randrange(1, 13))
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
