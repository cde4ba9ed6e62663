"""The hook computes advantages by definition from slime's rollout data, and refuses invalid batches."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.errors import TurnTableError
from advantage.hook import compute_advantages
from advantage.settings import KL_SPLIT
from advantage.turn_table import STALENESS, TurnKind, TurnRow, TurnSpan, encode_row
from tests.advantage.batches import FakeSample, expected, make_args, make_samples, rollout_data


def run(samples: list[FakeSample], **changes: Any) -> dict[str, Any]:
    data = rollout_data(samples)
    compute_advantages(make_args(**changes), data)
    return data


def one(row: TurnRow, mask: list[int], values: list[float] | None = None) -> FakeSample:
    values = torch.tensor([0.5] * len(mask) if values is None else values)
    return FakeSample(row, 2, mask, values, torch.zeros(len(mask)))


def turn(segment: int, index: int, reward: float = 1.0, n: int = 2, **flags: bool) -> FakeSample:
    return one(TurnRow(segment, index, turns=(TurnSpan(0, n, reward),), **flags), [1] * n)


def state(segment: int, index: int, value: float = 2.0) -> FakeSample:
    return one(TurnRow(segment, index, TurnKind.BOOTSTRAP), [0], [value])


@pytest.mark.parametrize("seed", range(20))
def test_random_episodes_in_any_order_agree_with_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    samples = make_samples(rng, rng.randint(1, 8))
    discounts = [rng.choice([0.0, 0.5, 0.99, 1.0]) for _ in range(4)]
    names = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
    changes = dict(zip(names, discounts, strict=True), kl_coef=rng.choice([0.0, 0.2]))
    data = run(samples, **changes)
    for i, (advantages, returns) in enumerate(expected(samples, make_args(**changes))):
        assert data["advantages"][i].dtype == torch.float32
        torch.testing.assert_close(data["advantages"][i].double(), advantages, atol=1e-5, rtol=0)
        torch.testing.assert_close(data["returns"][i].double(), returns, atol=1e-5, rtol=0)


def test_the_actors_loss_gets_the_staleness_of_each_token_and_the_critics_does_not() -> None:
    spans = (TurnSpan(0, 2, 1.0, staleness=3), TurnSpan(4, 5, 2.0, staleness=0))
    samples = [one(TurnRow(0, 0, terminated=True, turns=spans), [1, 1, 0, 0, 1]), turn(1, 0), state(1, 1)]
    data = run(samples, policy_loss="dis", slime_verlog_role="actor")
    assert [row.tolist() for row in data[STALENESS]] == [[3, 3, -1, -1, 0], [-1, -1], [-1]]
    for changes in ({"slime_verlog_role": "critic", "policy_loss": "dis"}, {"slime_verlog_role": "actor"}):
        assert STALENESS not in run(samples, **changes)


def test_termination_ends_value_even_when_a_limit_was_hit_at_the_same_time() -> None:
    for flags in ({"terminated": True}, {"terminated": True, "truncated": True}):
        got = run([turn(0, 0, 1.0, **flags), state(0, 1)])["returns"][0]
        torch.testing.assert_close(got, torch.ones(2))


def test_a_time_limit_bootstraps_only_where_the_converter_left_a_bootstrap_sample() -> None:
    assert run([turn(0, 0, 1.0, truncated=True)])["returns"][0].tolist() == [1.0, 1.0]
    got = run([turn(0, 0, 1.0, truncated=True), state(0, 1, 2.0)])["returns"]
    torch.testing.assert_close(got[0], torch.full((2,), 1.0 + 0.99 * 2.0))
    assert got[1].tolist() == [0.0]


def test_a_rank_without_samples_gets_empty_lists() -> None:
    data = run([])
    assert data["advantages"] == data["returns"] == []


def test_the_table_is_gone_afterwards_unless_the_kl_split_still_needs_it() -> None:
    samples = [turn(0, 0, terminated=True)]
    assert "prompt" not in run(samples)
    assert "prompt" in run(samples, rollout_data_postprocess_path=KL_SPLIT)


def test_results_do_not_share_memory_with_inputs() -> None:
    samples = make_samples(random.Random(3), 4)
    data = run(samples)
    for sample, values, kl in zip(samples, data["values"], data["kl"], strict=True):
        assert torch.equal(values, sample.values) and torch.equal(kl, sample.kl)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([turn(7, 3)], r"segment 7, turn 3: it neither terminated nor truncated"),
        ([turn(7, 0), turn(7, 2, terminated=True)], r"segment 7, turn 0: the next turn is missing"),
        ([turn(7, 0, terminated=True), turn(7, 0, terminated=True)], r"segment 7, turn 0: it is in the batch twice"),
        ([turn(7, 0, terminated=True), turn(7, 1, terminated=True)], r"segment 7, turn 0: it ended the episode"),
        ([state(7, 0), turn(7, 1, terminated=True)], r"segment 7, turn 0: a bootstrap sample is followed"),
        ([one(TurnRow(7, 0, TurnKind.BOOTSTRAP), [], [])], "sample 0: a bootstrap sample needs one response token"),
        ([replace(state(7, 0), mask=[1])], r"sample 0: its loss mask includes token 0 .* belongs to no turn"),
    ],
)
def test_turns_that_do_not_form_an_episode_are_named(samples: list[FakeSample], message: str) -> None:
    with pytest.raises(TurnTableError, match=message):
        run(samples)


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("values", float("nan"), "sample 1, response token 2: the value is nan, not finite"),
        ("kl", float("inf"), "sample 1, response token 2: -kl_coef x KL is -inf, not finite"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_sample_and_token(key: str, wrong: float, message: str) -> None:
    spans = (TurnSpan(0, 1, 1.0), TurnSpan(2, 3, 1.0))  # the token between the turns belongs to neither
    samples = [turn(0, 0), one(TurnRow(0, 1, terminated=True, turns=spans), [1, 0, 1])]
    data = rollout_data(samples)
    data[key][1][2] = wrong
    with pytest.raises(ValueError, match=message):
        compute_advantages(make_args(), data)
    data = rollout_data(samples)
    data[key][1][1] = wrong
    compute_advantages(make_args(), data)


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("values", None, "--advantage-estimator ppo"),
        ("loss_masks", [torch.ones(3, dtype=torch.int)], "sample 0: .* 3 entries for 2 response tokens"),
        ("prompt", [encode_row(turn(0, 0).row)] * 2, "2 rows for 1 samples"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(key: str, wrong: Any, message: str) -> None:
    data = {**rollout_data([turn(0, 0, terminated=True)]), key: wrong}
    with pytest.raises(TurnTableError, match=message):
        compute_advantages(make_args(), data if wrong else {k: v for k, v in data.items() if k != key})
