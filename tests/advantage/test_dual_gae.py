"""Dual-discount GAE through the hook equals its definition for all kinds of episodes, and refuses
wrong discounts."""

import random
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.settings import advantage_settings
from advantage.turn_table import TurnRow, TurnSpan
from tests.advantage.batches import (
    DISCOUNTS,
    FakeSample,
    check,
    check_rows,
    in_float64,
    make_args,
    make_samples,
    run,
    sample_of,
    state,
    turn,
)
from tests.conftest import load_recording

DISCOUNT = st.one_of(st.sampled_from([0.0, 1.0, 0.99, 0.5, 1e-9]), st.floats(0, 1))
KEYS = st.fixed_dictionaries(
    {name: DISCOUNT for name in DISCOUNTS} | {"kl_coef": st.sampled_from([0.0, 0.2])}
)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), keys=KEYS)
def test_every_batch_in_any_order_agrees_with_the_token_by_token_definition(
    seed: int, keys: dict[str, float]
) -> None:
    rng = random.Random(seed)
    samples = in_float64(make_samples(rng, rng.randint(1, 8)))
    data = run(samples, **keys)
    check(data, samples, make_args(**keys), atol=1e-9)
    for name in ("values", "kl"):
        assert all(
            torch.equal(row, vars(sample)[name])
            for row, sample in zip(data[name], samples, strict=True)
        )


@pytest.mark.parametrize("seed", range(5))
def test_float32_values_give_the_float64_result_rounded_once(seed: int) -> None:
    samples = make_samples(random.Random(seed), 8)
    data = run(samples)
    assert all(row.dtype == torch.float32 for row in data["advantages"] + data["returns"])
    exact = run(in_float64(samples))
    for name in ("advantages", "returns"):
        check_rows(data[name], exact[name], atol=2e-6)


@pytest.mark.parametrize("lengths", [[10_000, 1, 9_999], [7] * 400])
def test_turns_of_ten_thousand_tokens_and_episodes_of_400_turns_stay_exact(
    lengths: list[int],
) -> None:
    rng, last = random.Random(0), len(lengths) - 1
    values = [[rng.gauss(0, 1) for _ in range(length)] for length in lengths]
    samples = in_float64(
        turn(0, k, row, rng.gauss(0, 1), terminated=k == last) for k, row in enumerate(values)
    )
    for keys in (
        {},
        {"gamma_step": 1.0, "lambda_step": 1.0},
        {"gamma_token": 0.999, "lambda_token": 0.97},
    ):
        check(run(samples, **keys), samples, make_args(**keys), atol=1e-8)


@pytest.mark.parametrize("size", [1, 40])
def test_the_values_of_a_turn_leave_the_other_turns_bits_alone(size: int) -> None:
    rng = random.Random(size)
    quiet = [turn(k, 0, [rng.random() for _ in range(size)], terminated=True) for k in range(9)]
    loud = [*quiet[:4], turn(4, 0, [1e30] * size, terminated=True), *quiet[5:]]
    rows = zip(run(quiet)["advantages"], run(loud)["advantages"], strict=True)
    assert [torch.equal(*pair) for pair in rows] == [True] * 4 + [False] + [True] * 4


@pytest.mark.parametrize("value", [-0.1, 1.1, True])
def test_a_discount_outside_zero_and_one_is_refused_by_name(value: object) -> None:
    for name in DISCOUNTS:
        with pytest.raises(ValueError, match=name):
            advantage_settings(Namespace(**{name: value}))


@pytest.mark.parametrize("case", [0, 1])
def test_verlogs_recorded_advantages_are_reproduced_on_its_real_tokens(case: int) -> None:
    record = load_recording("verlog_gae.json.gz")[case]
    names = {"gamma_step": "step_gamma", "lambda_step": "step_lam"}
    names |= {"gamma_token": "token_gamma", "lambda_token": "token_lam"}
    samples = verlog_samples(record)
    data = run(samples, kl_coef=-1.0, **{ours: record[theirs] for ours, theirs in names.items()})
    for number, sample in enumerate(samples):
        kept = torch.tensor(sample.mask).bool()
        for name, theirs in (("advantages", "advantages_raw"), ("returns", "returns")):
            wanted = torch.tensor(record[theirs][number])[: len(kept)][kept]
            torch.testing.assert_close(data[name][number][kept], wanted, atol=1e-6, rtol=0)


def verlog_samples(record: dict[str, Any]) -> list[FakeSample]:
    """Row t * E + e of a recording is turn t of environment e, and the last E rows are states.

    The KL stands for the rewards of tokens.
    """
    envs, turns = record["E"], record["T"]
    segments = [env * (turns + 1) for env in range(envs)]
    samples = []
    for number, values in enumerate(record["values"]):
        index, env = divmod(number, envs)
        if index == turns:
            samples.append(state(segments[env], turns, values[0]))
            continue
        ends, mask = bool(record["done"][number]), record["mask"][number]
        row = TurnRow(segments[env], index, terminated=ends, turns=(TurnSpan(0, len(mask), 0.0),))
        samples.append(
            replace(sample_of(row, mask, values), kl=torch.tensor(record["rewards"][number]))
        )
        segments[env] += ends
    return samples
