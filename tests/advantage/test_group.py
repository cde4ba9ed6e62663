"""Estimators without a critic equal plain loops over their definitions, for incomplete episodes
too.

tests/advantage/test_layouts.py checks the same over several ranks.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advantage.errors import FlagError, TurnTableError
from advantage.estimators import ESTIMATORS
from advantage.group import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan, anchor_of
from tests.advantage.batches import FakeSample, Place, make_args, rollout_data, sample_of, state

GAMMA, LAMBDA = 0.9, 0.7
Scores = dict[Place, float]


def episodes_of(rng: random.Random, count: int) -> list[list[FakeSample]]:
    """Window samples of whole, cut and untrained episodes; few rewards and anchors, so that many
    are equal."""
    return [_episode(rng, segment) for segment in range(count)]


def _episode(rng: random.Random, segment: int) -> list[FakeSample]:
    first, turns = rng.choice([0, 0, 0, 4]), rng.choice([1, 2, 5])
    ending = rng.choice(["terminated", "terminated", "truncated", "cut"])
    group, is_trained = rng.randrange(-1, 3), rng.random() < 0.9
    episode = []
    for k in range(turns):
        tokens, reward, moves = (
            rng.choice([1, 2, 7]),
            rng.choice([-0.1, 0.0, 1.0]),
            rng.random() < 0.8,
        )
        anchor = rng.randrange(4) if moves else -1
        span = TurnSpan(0, tokens, reward, anchor=anchor, moves=moves, baseline=rng.random())
        flags = {ending: True} if k == turns - 1 and ending != "cut" else {}
        row = TurnRow(segment, first + k, turns=(span,), group=group, **flags)
        episode.append(sample_of(row, [int(is_trained)] * tokens))
    if ending == "cut":
        episode.append(state(segment, first + turns))
    return episode


def by_definition(
    episodes: list[list[FakeSample]], estimator: str, discount: str = "step"
) -> Scores:
    """Advantage of every turn: plain loops over groups, as the papers write it."""
    groups: dict[int, list[list[TurnRow]]] = defaultdict(list)
    scores: Scores = {}
    for episode in episodes:
        rows = [s.row for s in episode if s.row.kind is TurnKind.TURN]
        scores |= {name(row): 0.0 for row in rows}
        is_whole = rows[0].first_turn == 0 and (rows[-1].terminated or rows[-1].truncated)
        if is_whole and any(episode[0].mask):
            groups[rows[0].group].append(rows)
    for members in groups.values():
        match estimator:
            case "rloo":
                scores |= by_rloo(members)
            case "g2po":
                scores |= by_g2po(members)
            case "gagpo":
                scores |= by_gagpo(members)
            case "branches":
                for rows in members:
                    scores |= {
                        name(row): to_go(rows[t:]) - row.turns[0].baseline
                        for t, row in enumerate(rows)
                    }
            case _:
                scores |= by_gigpo(members, estimator, discount)
    return scores


def name(row: TurnRow) -> Place:
    return row.segment, row.first_turn


def to_go(rows: list[TurnRow], gamma: float = GAMMA) -> float:
    moved = accumulate((row.turns[0].moves for row in rows[:-1]), initial=0)
    return sum(gamma**n * row.turns[0].reward for n, row in zip(moved, rows, strict=True))


def relative(x: float, others: Sequence[float]) -> float:
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
    returns, visits, scores = (
        [to_go(rows, gamma) for rows in members],
        returns_of_states(members),
        {},
    )
    for i, rows in enumerate(members):
        for t, row in enumerate(rows):
            of_turn = (
                relative(to_go(rows[t:]), visits[state_of(row)]) if estimator == "gigpo" else 0.0
            )
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
            advantage = (
                row.turns[0].reward + gamma * after - value[state_of(row)] + decay * advantage
            )
            after = value[state_of(row)]
            raw[name(row)] = advantage
    return {turn: relative(advantage, [*raw.values()]) for turn, advantage in raw.items()}


def computed(samples: Sequence[FakeSample], estimator: str, **changes: Any) -> dict[str, Any]:
    """The batch of one rank after the hook."""
    keys = {"kl_coef": 0.0, "gamma_step": GAMMA, "lambda_step": LAMBDA, "n_samples_per_prompt": 4}
    data = rollout_data(list(samples))
    del data["values"]
    compute_advantages(make_args(**{**keys, **changes}, group_estimator=estimator), data)
    return data


def check(
    samples: Sequence[FakeSample], wanted: Scores, estimator: str, discount: str = "step"
) -> None:
    data = computed(samples, estimator, gigpo_discount=discount)
    for sample, row in zip(samples, data["advantages"], strict=True):
        assert row.tolist() == pytest.approx(
            [wanted.get(name(sample.row), 0.0)] * len(row), abs=1e-5
        ), sample.row


@pytest.mark.parametrize(
    ("estimator", "discount"),
    [*((estimator, "step") for estimator in ESTIMATORS), ("gigpo", "both")],
)
@given(rng=st.randoms(use_true_random=False))
def test_every_batch_agrees_with_the_definition_in_any_order(
    estimator: str, discount: str, rng: random.Random
) -> None:
    episodes = episodes_of(rng, rng.randrange(1, 13))
    samples = [s for episode in episodes for s in episode]
    rng.shuffle(samples)
    check(samples, by_definition(episodes, estimator, discount), estimator, discount)


def check_ranks_share(rank: int, world: int) -> None:
    """Each rank of a batch that is spread over `world` ranks, unevenly, computes its part of the
    whole."""
    episodes = episodes_of(random.Random(5), 12)
    samples = [s for episode in episodes for s in episode]
    random.Random(1).shuffle(samples)
    third = len(samples) // 3
    mine = samples[:third] if rank == 0 else samples[third + rank - 1 :: world - 1]
    for estimator in ESTIMATORS:
        check(mine, by_definition(episodes, estimator), estimator)


def game(
    segment: int, rewards: list[float], anchors: list[int], group: int = 1, whole: bool = True
) -> list[FakeSample]:
    """An episode with a token per turn."""
    spans = [
        TurnSpan(0, 1, reward, anchor=anchor)
        for reward, anchor in zip(rewards, anchors, strict=True)
    ]
    last = len(spans) - 1
    rows = [
        TurnRow(segment, k, turns=(span,), group=group, terminated=whole and k == last)
        for k, span in enumerate(spans)
    ]
    return [sample_of(row) for row in rows]


A, B, C = 0, 1, 2
GAMES = [
    *game(0, [0.0, 0.0, 10.0], [A, B, C]),
    *game(1, [0.0, 0.0, 0.0, 0.0], [A, B, A, B]),
    *game(2, [0.0, 0.0, 0.0, 10.0], [A, A, B, B]),
]
"""Three episodes of one group: won, lost, won."""
WORKED = {
    # Computed by the code of G2PO's authors.
    "g2po": [
        1.1730,
        2.9698,
        0.7447,
        -0.8091,
        -1.8451,
        -0.8091,
        -5.0715,
        -1.2393,
        1.1730,
        0.4249,
        3.2887,
    ],
    # Worked out apart from this code.
    "gagpo": [
        0.8018,
        0.9954,
        -0.0238,
        -0.7998,
        -1.1121,
        -1.1870,
        -1.6214,
        0.4034,
        0.6348,
        0.7756,
        1.1331,
    ],
}


@pytest.mark.parametrize(("estimator", "wanted"), WORKED.items())
def test_a_worked_example(estimator: str, wanted: list[float]) -> None:
    rows = computed(GAMES, estimator, gamma_step=0.95, lambda_step=0.8)["advantages"]
    assert [row.item() for row in rows] == pytest.approx(wanted, abs=1e-4)


def test_gigpo_adds_the_weighted_comparison_of_turns_in_the_same_state() -> None:
    samples = game(0, [0.0, 1.0], [4, 8]) + game(1, [0.0, 0.0], [4, 9])
    plain = {"gamma_step": 1.0, "grpo_std_normalization": False}
    rows = computed(samples, "gigpo", gigpo_step_weight=2.0, **plain)["advantages"]
    assert [row.item() for row in rows] == [0.5 + 2 * 0.5, 0.5, -0.5 - 2 * 0.5, -0.5]


def test_the_share_of_turns_whose_state_has_company_counts_whole_episodes_alone() -> None:
    cut = game(3, [0.0, 0.0], [A, A], group=2, whole=False)
    other_group = game(4, [0.0, 0.0], [C, -1], group=2)  # a turn without an anchor is alone
    data = computed([*GAMES, *cut, state(3, 2), *other_group], "grpo")
    assert data["shared_state_ratio"].item() == pytest.approx(10 / 13)


def test_a_missing_turn_is_named() -> None:
    first, _, third = game(4, [1.0, 2.0, 3.0], [A, A, A])
    with pytest.raises(TurnTableError, match="segment 4: turn 0 is followed by turn 2"):
        computed([first, third], "grpo")


@pytest.mark.parametrize(
    ("groups", "per_prompt"), [((1, 1), 2), ((1, 2), 1)], ids=["one start", "one each"]
)
def test_the_hook_puts_each_turns_advantage_on_its_trained_tokens(
    groups: tuple[int, int], per_prompt: int
) -> None:
    """With one sample per prompt, episodes are compared with the batch."""
    two, one = (TurnSpan(0, 2, 0.0), TurnSpan(3, 5, 2.0)), (TurnSpan(0, 2, 0.0),)
    rows = [
        TurnRow(k, 0, terminated=True, turns=turns, group=groups[k])
        for k, turns in enumerate((two, one))
    ]
    samples = [sample_of(rows[0], [1, 1, 0, 1, 1, 0]), sample_of(rows[1], [1, 0, 0])]
    data = computed(samples, "rloo", gamma_step=1.0, n_samples_per_prompt=per_prompt)
    assert [row.tolist() for row in data["advantages"]] == [
        [2.0, 2.0, 0.0, 2.0, 2.0, 0.0],
        [-2.0, 0.0, 0.0],
    ]
    assert "prompt" not in data and data["returns"][0].tolist() == data["advantages"][0].tolist()


def test_the_hook_refuses_kl_in_reward() -> None:
    with pytest.raises(FlagError, match="--use-kl-loss"):
        computed(GAMES, "grpo", kl_coef=0.1)


def test_equal_prompts_have_equal_anchors() -> None:
    one, same, other = (anchor_of(np.array(ids, np.int32)) for ids in ([1, 2], [1, 2], [1, 3]))
    assert one == same != other
    assert 0 <= anchor_of(np.array([], np.int32)) < 2**53
