"""dual_discount_gae equals its definition for all kinds of episodes, and refuses invalid input."""

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


def test_turns_of_one_token_give_classical_gae() -> None:
    batch = random_batch([1] * 6, chain(6))
    v, r, last = batch["values"], batch["token_rewards"] + batch["turn_rewards"], batch["bootstrap_values"][-1:]
    deltas = r + 0.99 * torch.cat([v[1:], last]) - v
    sums = [sum((0.99 * 0.95) ** k * deltas[t + k] for k in range(6 - t)) for t in range(6)]
    advantages, _ = dual_discount_gae(**batch, **VERLOG)
    torch.testing.assert_close(advantages, torch.stack(sums), atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [1, 7, 32, 40])
def test_the_values_of_a_turn_leave_the_other_turns_bits_alone(size: int) -> None:
    batch = dict(random_batch([size] * 9, [-1] * 9), bootstrap_values=torch.zeros(9).double())
    loud = dict(batch, values=batch["values"].clone())
    loud["values"][4 * size : 5 * size] = 1e30
    quiet, disturbed = (dual_discount_gae(**b, **VERLOG)[0].split(size) for b in (batch, loud))
    assert all(torch.equal(quiet[t], disturbed[t]) for t in range(9) if t != 4)


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
    batch, recorded, discounts = verlog_batch(load_recording("verlog_gae.json.gz")[case])
    advantages, returns = dual_discount_gae(**batch, **discounts)
    torch.testing.assert_close(advantages, recorded["advantages_raw"], atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, recorded["returns"], atol=1e-6, rtol=0)


def verlog_batch(record: dict) -> tuple[dict, dict, dict]:
    """Rows t * E + env become turns over the positions of the mask; the last E rows are bootstrap states."""
    envs, turns = record["E"], record["E"] * record["T"]
    kept = torch.tensor(record["mask"])[:turns].bool()
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
