"""Estimators without a critic equal their definitions, are unbiased as claimed, and leave out incomplete episodes."""

import itertools
from argparse import Namespace
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch

from advantage.errors import FlagError, TurnTableError
from advantage.estimators import ESTIMATORS
from advantage.exchange import BOOTSTRAP, TERMINATED
from advantage.group import GroupTurns, compute_advantages, group_advantages
from advantage.settings import advantage_settings
from advantage.turn_table import TurnRow, TurnSpan, anchor_of
from slime_verlog import ConfigError
from tests.advantage.batches import FakeSample, make_args, rollout_data, sample_of

Turn = tuple[int, int, int, float, int, int, int]
"""segment, index, flags, reward, group, anchor, trained"""


def table(turns: list[Turn]) -> GroupTurns:
    columns = torch.tensor(turns, dtype=torch.float64).reshape(-1, 7).unbind(1)
    return GroupTurns(*columns[:2], columns[2].long(), *columns[3:], torch.zeros(len(turns)))


def episode(segment: int, rewards: list[float], group: int = -1, end: int = TERMINATED, **more: Any) -> list[Turn]:
    anchors = more.get("anchors", [-1] * len(rewards))
    first, trained = more.get("first", 0), more.get("trained", 1)
    last = len(rewards) - 1
    return [
        (segment, first + k, end if k == last else 0, reward, group, anchors[k], trained)
        for k, reward in enumerate(rewards)
    ]


def scores(turns: list[Turn], *, normalize: bool = True, estimator: str = "grpo", **keys: Any) -> list[float]:
    settings = advantage_settings(Namespace(**{"gamma_step": 1.0, **keys}, group_estimator=estimator))
    return group_advantages(table(turns), settings, normalize=normalize)[0].tolist()


def test_gigpo_adds_the_comparison_of_turns_in_the_same_state() -> None:
    turns = episode(0, [0.0, 1.0], 1, anchors=[4, 8]) + episode(1, [0.0, 0.0], 1, anchors=[4, 9])
    got = scores(turns, estimator="gigpo", normalize=False, gigpo_step_weight=2.0)
    assert got == pytest.approx([0.5 + 2 * 0.5, 0.5, -0.5 - 2 * 0.5, -0.5])


def test_branches_compare_a_turns_return_with_its_baseline() -> None:
    turns = table(episode(0, [1.0, 2.0, 4.0]))
    turns = replace(turns, baseline=torch.tensor([1.0, 0.5, 5.0]))
    settings = advantage_settings(Namespace(gamma_step=0.5, group_estimator="branches"))
    found, _ = group_advantages(turns, settings, normalize=True)
    assert found.tolist() == [1 + 0.5 * (2 + 0.5 * 4) - 1.0, 2 + 0.5 * 4 - 0.5, 4 - 5.0]


A, B, C = 0, 1, 2
GAMES = (
    (0, [0.0, 0.0, 10.0], [A, B, C]),
    (1, [0.0, 0.0, 0.0, 0.0], [A, B, A, B]),
    (2, [0.0, 0.0, 0.0, 10.0], [A, A, B, B]),
)
"""Segment, rewards and anchors of three episodes of one group: won, lost, won."""


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        # Every turn counts in the comparison of episodes, as in the code of G2PO's authors.
        ({"estimator": "g2po", "gigpo_step_weight": 0.0}, [0.7207] * 3 + [-1.2613] * 4 + [0.7207] * 4),
        (
            {"estimator": "g2po"},  # computed by the authors' code
            [1.1730, 2.9698, 0.7447, -0.8091, -1.8451, -0.8091, -5.0715, -1.2393, 1.1730, 0.4249, 3.2887],
        ),
        (
            {"estimator": "gagpo", "normalize": False},  # this and the next: worked out apart from this code
            [2.9973, 3.7000, 0.0, -2.8173, -3.9508, -4.2227, -5.8000, 1.5507, 2.3908, 2.9020, 4.2000],
        ),
        (
            {"estimator": "gagpo"},
            [0.8018, 0.9954, -0.0238, -0.7998, -1.1121, -1.1870, -1.6214, 0.4034, 0.6348, 0.7756, 1.1331],
        ),
    ],
)
def test_a_worked_example(keys: dict[str, Any], wanted: list[float]) -> None:
    turns = [turn for game, rewards, anchors in GAMES for turn in episode(game, rewards, 1, anchors=anchors)]
    got = scores(turns, gamma_step=0.95, lambda_step=0.8, **keys)
    if keys.get("normalize") is False:
        got = [x - got[2] for x in got]  # the example's numbers are before the mean is subtracted; E1's last is 0
    assert got == pytest.approx(wanted, abs=1e-4)


def test_the_share_of_turns_whose_state_has_company_counts_whole_episodes_alone() -> None:
    turns = [turn for game, rewards, anchors in GAMES for turn in episode(game, rewards, 1, anchors=anchors)]
    turns += episode(3, [0.0, 0.0], 2, anchors=[A, A], end=0)  # cut, so it is not compared
    turns += episode(4, [0.0, 0.0], 2, anchors=[C, -1])  # in another group; a turn without an anchor is alone
    _, shared = group_advantages(table(turns), advantage_settings(Namespace()), normalize=True)
    assert shared == pytest.approx(10 / 13)


def test_gigpo_counts_an_early_and_a_late_win_alike_as_episodes_unless_both_returns_are_discounted() -> None:
    turns = episode(0, [1.0], 1) + episode(1, [0.0, 0.0, 1.0], 1) + episode(2, [0.0], 1)
    papers = scores(turns, estimator="gigpo", gamma_step=0.5)
    both = scores(turns, estimator="gigpo", gamma_step=0.5, gigpo_discount="both")
    assert papers[0] == papers[1]
    assert both[0] > both[1]


def test_episodes_without_a_group_are_compared_with_the_batch() -> None:
    assert scores(episode(0, [1.0]) + episode(1, [0.0]), estimator="rloo") == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize(
    "outsider",
    [episode(9, [50.0], 1, trained=0), [*episode(9, [50.0], 1, end=0), (9, 1, BOOTSTRAP, 0.0, -1, -1, 0)]],
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_episode_without_a_return_gets_zero_and_is_not_compared(outsider: list[Turn], estimator: str) -> None:
    turns = episode(0, [1.0], 1, anchors=[2]) + episode(1, [0.0], 1, anchors=[2])
    alone = scores(turns, estimator=estimator)
    assert scores(turns + outsider, estimator=estimator) == alone + [0.0] * len(outsider)


def test_a_missing_turn_is_named() -> None:
    turns = episode(4, [1.0, 2.0, 3.0])
    with pytest.raises(TurnTableError, match="segment 4: turn 0 is followed by turn 2"):
        scores([turns[0], turns[2]])


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="gigpo_discount must be one of 'step', 'both', got 'none'"):
        advantage_settings(Namespace(gigpo_discount="none"))
    with pytest.raises(ConfigError, match="group_estimator must be one of 'grpo', 'rloo', .* got 'ppo'"):
        advantage_settings(Namespace(group_estimator="ppo"))


STOP = 0.4
"""Chance to stop at each of three turns; going on costs 1, stopping at turn t pays t squared."""


def plays() -> list[tuple[float, list[float], list[float]]]:
    """Every episode of the stopping game: probability, rewards, and d log pi / d logit(stop) at each turn."""
    found = []
    for stop_at in range(3):
        chance = (1 - STOP) ** stop_at * (STOP if stop_at < 2 else 1.0)
        slopes = [-STOP] * stop_at + [1 - STOP]
        found.append((chance, [-1.0] * stop_at + [float(stop_at**2)], slopes[:2]))
    return found


def test_when_the_policy_decides_when_to_stop_rloo_is_fair_and_a_per_turn_baseline_is_not() -> None:
    """The expected policy gradient at both decisions of an episode in groups of two, by enumeration of both episodes.

    Scaled alike at both, a gradient still points the right way. Comparing those that are alive at a turn does more.
    """
    true, rloo, by_index = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for (mine, rewards, slopes), (other, others, _) in itertools.product(plays(), repeat=2):
        weights = scores(episode(0, rewards) + episode(1, others), estimator="rloo")
        for t, slope in enumerate(slopes):
            share = mine * other * slope
            alive = [sum(found[t:]) for found in (rewards, others) if t < len(found)]
            true[t] += share * alive[0]
            rloo[t] += share * weights[t]
            by_index[t] += share * (alive[0] - mean(alive))
    assert sum(rloo) == pytest.approx(sum(true))
    assert by_index[0] / true[0] != pytest.approx(by_index[1] / true[1], rel=0.05)


def sample(segment: int, rewards: list[float], group: int, mask: list[int] | None = None) -> FakeSample:
    spans = tuple(TurnSpan(3 * k, 3 * k + 2, reward) for k, reward in enumerate(rewards))
    row = TurnRow(segment, 0, terminated=True, turns=spans, group=group)
    return sample_of(row, mask or [1, 1, 0] * len(rewards))


def test_the_hook_puts_each_turns_advantage_on_its_trained_tokens() -> None:
    data = rollout_data([sample(0, [0.0, 2.0], 1), sample(1, [0.0], 1, [1, 0, 0])])
    del data["values"]
    compute_advantages(make_args(kl_coef=0.0, gamma_step=1.0, group_estimator="rloo"), data)
    assert [row.tolist() for row in data["advantages"]] == [[2.0, 2.0, 0.0, 2.0, 2.0, 0.0], [-2.0, 0.0, 0.0]]
    assert data["shared_state_ratio"].item() == 0.0
    assert "prompt" not in data and data["returns"][0].tolist() == data["advantages"][0].tolist()


def test_with_one_sample_per_prompt_episodes_are_compared_with_the_batch() -> None:
    data = rollout_data([sample(0, [1.0], 1), sample(1, [0.0], 2)])
    args = make_args(kl_coef=0.0, gamma_step=1.0, group_estimator="rloo", n_samples_per_prompt=1)
    compute_advantages(args, data)
    assert [row.tolist() for row in data["advantages"]] == [[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]]


def test_the_hook_refuses_kl_in_reward() -> None:
    data = rollout_data([sample(0, [1.0], 1)])
    with pytest.raises(FlagError, match="--use-kl-loss"):
        compute_advantages(make_args(kl_coef=0.1), data)


def test_equal_prompts_have_equal_anchors() -> None:
    one, same, other = (anchor_of(np.array(ids, np.int32)) for ids in ([1, 2], [1, 2], [1, 3]))
    assert one == same != other
    assert 0 <= anchor_of(np.array([], np.int32)) < 2**53
