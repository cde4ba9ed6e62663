"""dual_discount_gae equals its definition for all kinds of episodes, and refuses invalid input."""

import random
from argparse import Namespace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.gae import Discounts, discounts_of
from advantage.settings import advantage_settings
from tests.advantage.one_process import dual_discount_gae
from tests.advantage.reference import brute_force
from tests.conftest import load_recording

ONES = dict(gamma_step=1.0, lambda_step=1.0, gamma_token=1.0, lambda_token=1.0)
VERLOG = dict(gamma_step=0.99, lambda_step=0.95, gamma_token=1.0, lambda_token=1.0)
DISCOUNT = st.one_of(st.sampled_from([0.0, 1.0, 0.99, 0.5, 1e-9]), st.floats(0, 1))
DISCOUNTS = st.fixed_dictionaries({name: DISCOUNT for name in ONES})


@st.composite
def batches(draw: st.DrawFn, max_turns: int = 12) -> dict[str, torch.Tensor]:
    """Turns in any order, linked into episodes of any lengths, ended or cut."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 90]), max_size=max_turns))
    order = draw(st.permutations(range(len(lengths))))
    following = [-1] * len(lengths)
    for t, after in pairwise(order):
        if draw(st.booleans()):
            following[t] = after
    seed = draw(st.integers(0, 2**31))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
    return random_batch(lengths, following, seed, scale)


def random_batch(lengths: list[int], following: list[int], seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, dtype=torch.float64, generator=generator) * scale
    return {
        "values": draw(sum(lengths)),
        "token_rewards": draw(sum(lengths)),
        "turn_lengths": torch.tensor(lengths, dtype=torch.long),
        "turn_rewards": draw(len(lengths)),
        "next_turn": torch.tensor(following, dtype=torch.long),
        "bootstrap_values": draw(len(lengths)) * torch.randint(0, 2, (len(lengths),), generator=generator),
    }


def chain(n: int) -> list[int]:
    return [*range(1, n), -1] if n else []


def expected(batch: dict[str, torch.Tensor], discounts: dict[str, float]) -> torch.Tensor:
    lists = {k: v.tolist() for k, v in batch.items()}
    return torch.tensor(brute_force(**lists, **discounts), dtype=torch.float64)


@settings(max_examples=200, deadline=None)
@given(batches(), DISCOUNTS)
def test_every_batch_agrees_with_the_token_by_token_definition(batch: dict, discounts: dict) -> None:
    advantages, returns = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, expected(batch, discounts), atol=1e-9, rtol=0)
    torch.testing.assert_close(returns, advantages + batch["values"], atol=0, rtol=0)


@settings(max_examples=60, deadline=None)
@given(batches(), DISCOUNTS)
def test_float32_input_gives_the_float64_result_rounded_once(batch: dict, discounts: dict) -> None:
    single = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    exact = {k: v.double() if v.is_floating_point() else v for k, v in single.items()}
    advantages, returns = dual_discount_gae(**single, **discounts)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), expected(exact, discounts), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("discounts", [ONES, VERLOG, dict(VERLOG, gamma_token=0.999, lambda_token=0.97)])
@pytest.mark.parametrize("lengths", [[10_000, 1, 9_999], [1] * 400, [7] * 400])
def test_turns_of_ten_thousand_tokens_and_episodes_of_400_turns_stay_exact(lengths: list[int], discounts: dict) -> None:
    batch = random_batch(lengths, chain(len(lengths)))
    advantages, _ = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, expected(batch, discounts), atol=1e-8, rtol=0)


@settings(max_examples=50, deadline=None)
@given(batches(), DISCOUNTS, st.randoms())
def test_the_order_of_the_turns_in_the_batch_does_not_matter(batch: dict, discounts: dict, random: Any) -> None:
    order = list(range(len(batch["turn_lengths"])))
    random.shuffle(order)
    where = {old: new for new, old in enumerate(order)}
    tokens = [part.split(batch["turn_lengths"].tolist()) for part in (batch["values"], batch["token_rewards"])]
    index = torch.tensor(order, dtype=torch.long)
    shuffled = {
        "values": torch.cat([tokens[0][t] for t in order] + [torch.empty(0, dtype=torch.float64)]),
        "token_rewards": torch.cat([tokens[1][t] for t in order] + [torch.empty(0, dtype=torch.float64)]),
        "next_turn": torch.tensor([where.get(int(batch["next_turn"][t]), -1) for t in order], dtype=torch.long),
        **{k: batch[k][index] for k in ("turn_lengths", "turn_rewards", "bootstrap_values")},
    }
    straight = dual_discount_gae(**batch, **discounts)[0].split(batch["turn_lengths"].tolist())
    mixed = dual_discount_gae(**shuffled, **discounts)[0].split(shuffled["turn_lengths"].tolist())
    for t, part in enumerate(straight):
        torch.testing.assert_close(mixed[where[t]], part, atol=1e-10, rtol=0)


def test_with_all_discounts_one_the_return_is_the_sum_of_later_rewards_and_the_bootstrap() -> None:
    batch = random_batch([3, 1, 40, 5], chain(4))
    _, returns = dual_discount_gae(**batch, **ONES)
    paid = batch["token_rewards"].clone()
    paid[batch["turn_lengths"].cumsum(0) - 1] += batch["turn_rewards"]
    later = paid.flip(0).cumsum(0).flip(0) + batch["bootstrap_values"][-1]
    torch.testing.assert_close(returns, later, atol=1e-10, rtol=0)


def test_with_token_discounts_one_first_tokens_get_turn_level_gae() -> None:
    batch = random_batch([4, 1, 33, 6], chain(4))
    advantages, _ = dual_discount_gae(**batch, **VERLOG)
    starts = batch["turn_lengths"].cumsum(0) - batch["turn_lengths"]
    per_turn = torch.stack([part.sum() for part in batch["token_rewards"].split(batch["turn_lengths"].tolist())])
    turns = dict(batch, values=batch["values"][starts], token_rewards=per_turn, turn_lengths=torch.ones(4).long())
    torch.testing.assert_close(advantages[starts], expected(turns, VERLOG), atol=1e-10, rtol=0)


def test_inside_a_turn_with_token_discounts_one_advantages_differ_by_value_and_reward_alone() -> None:
    batch = random_batch([9], [-1])
    advantages, _ = dual_discount_gae(**batch, **VERLOG)
    steps = batch["token_rewards"][:-1] + batch["values"][1:] - batch["values"][:-1]
    torch.testing.assert_close(advantages[:-1] - advantages[1:], steps, atol=1e-10, rtol=0)


def test_turns_of_one_token_give_classical_gae() -> None:
    batch = random_batch([1] * 6, chain(6))
    v, r, last = batch["values"], batch["token_rewards"] + batch["turn_rewards"], batch["bootstrap_values"][-1:]
    deltas = r + 0.99 * torch.cat([v[1:], last]) - v
    sums = [sum((0.99 * 0.95) ** k * deltas[t + k] for k in range(6 - t)) for t in range(6)]
    advantages, _ = dual_discount_gae(**batch, **VERLOG)
    torch.testing.assert_close(advantages, torch.stack(sums), atol=1e-10, rtol=0)


def test_a_step_discount_of_zero_separates_all_turns() -> None:
    linked = random_batch([3, 5, 2], chain(3))
    alone = dict(linked, next_turn=torch.tensor([-1, -1, -1]), bootstrap_values=torch.zeros(3).double())
    discounts = dict(VERLOG, gamma_step=0.0)
    torch.testing.assert_close(
        dual_discount_gae(**linked, **discounts), dual_discount_gae(**alone, **discounts), atol=0, rtol=0
    )


def test_one_turn_episodes_do_not_affect_each_other() -> None:
    batch = dict(random_batch([5, 1, 8], [-1, -1, -1]), bootstrap_values=torch.zeros(3).double())
    together, _ = dual_discount_gae(**batch, **VERLOG)
    for t, part in enumerate(together.split([5, 1, 8])):
        alone = {k: x.split([5, 1, 8])[t] if len(x) == 14 else x[t : t + 1] for k, x in batch.items()}
        torch.testing.assert_close(dual_discount_gae(**alone, **VERLOG)[0], part, atol=1e-12, rtol=0)


def test_an_empty_turn_passes_reward_and_value_on_and_costs_one_step() -> None:
    batch = random_batch([2, 0, 3], chain(3))
    advantages, _ = dual_discount_gae(**batch, **VERLOG)
    v, r = batch["values"], batch["turn_rewards"]
    worth = r[1] + 0.99 * v[2]
    delta = batch["token_rewards"][1] + r[0] + 0.99 * worth - v[1]
    torch.testing.assert_close(advantages[1], delta + (0.99 * 0.95) ** 2 * advantages[2], atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(10))
def test_turns_of_any_mixture_of_lengths(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 1, 5, 31, 32, 33, 63, 64, 65, 200]) for _ in range(30)]
    batch = random_batch(lengths, chain(30), seed)
    discounts = dict(VERLOG, gamma_token=rng.choice([1.0, 0.9]), lambda_token=rng.choice([1.0, 0.8]))
    advantages, _ = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, expected(batch, discounts), atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [1, 7, 32, 40])
def test_the_values_of_a_turn_leave_the_other_turns_bits_alone(size: int) -> None:
    batch = dict(random_batch([size] * 9, [-1] * 9), bootstrap_values=torch.zeros(9).double())
    loud = dict(batch, values=batch["values"].clone())
    loud["values"][4 * size : 5 * size] = 1e30
    quiet, disturbed = (dual_discount_gae(**b, **VERLOG)[0].split(size) for b in (batch, loud))
    assert all(torch.equal(quiet[t], disturbed[t]) for t in range(9) if t != 4)


def test_an_empty_batch_gives_empty_results() -> None:
    advantages, returns = dual_discount_gae(**random_batch([], []), **VERLOG)
    assert advantages.shape == returns.shape == (0,)


def test_inputs_are_unchanged() -> None:
    batch = random_batch([2, 40, 3], chain(3))
    before = {k: v.clone() for k, v in batch.items()}
    dual_discount_gae(**batch, **VERLOG)
    assert all(torch.equal(batch[k], before[k]) for k in batch)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.9", None, True])
@pytest.mark.parametrize("name", list(ONES))
def test_a_discount_outside_zero_and_one_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        advantage_settings(Namespace(**{name: value}))


def test_discounts_are_read_from_args_and_default_to_verlogs() -> None:
    args = type("Args", (), {"gamma_step": 0.5, "lambda_token": 0.25})()
    assert discounts_of(advantage_settings(args), None) == Discounts(0.5, 0.95, 1.0, 0.25)


@pytest.mark.parametrize("case", [0, 1])
def test_verlogs_recorded_advantages_are_reproduced_on_its_real_tokens(case: int) -> None:
    batch, recorded, discounts = verlog_batch(load_recording("verlog_gae.json.gz")[case], "mask")
    advantages, returns = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, recorded["advantages_raw"], atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, recorded["returns"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", [0, 1])
def test_verlogs_phantom_position_can_be_reproduced_from_the_outside(case: int) -> None:
    batch, recorded, discounts = verlog_batch(load_recording("verlog_gae.json.gz")[case], "critic_mask")
    advantages, _ = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, recorded["advantages_raw"], atol=1e-6, rtol=0)


def verlog_batch(record: dict, mask: str) -> tuple[dict, dict, dict]:
    """Rows t * E + env become turns over the positions of `mask`; the last E rows are bootstrap states."""
    envs, turns = record["E"], record["E"] * record["T"]
    kept = torch.tensor(record[mask])[:turns].bool()
    packed = {
        key: torch.tensor(record[key], dtype=torch.float64)[:turns][kept]
        for key in ("values", "rewards", "advantages_raw", "returns")
    }
    done = torch.tensor(record["done"][:turns]).bool()
    following = torch.arange(turns) + envs
    following[done | (following >= turns)] = -1
    first = torch.tensor(record["values"], dtype=torch.float64)[:, 0]
    batch = {
        "values": packed["values"],
        "token_rewards": packed["rewards"],
        "turn_lengths": kept.sum(1),
        "turn_rewards": torch.zeros(turns, dtype=torch.float64),
        "next_turn": following,
        "bootstrap_values": torch.where(done, 0.0, first[envs:]),
    }
    names = {"gamma_step": "step_gamma", "lambda_step": "step_lam", "gamma_token": "token_gamma"}
    discounts = {ours: record[theirs] for ours, theirs in names.items()}
    return batch, packed, {**discounts, "lambda_token": record["token_lam"]}
