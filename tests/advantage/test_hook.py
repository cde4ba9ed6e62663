"""The hook computes advantages by definition from slime's rollout data, and refuses invalid batches."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    values = torch.tensor(values or [0.5] * len(mask))
    return FakeSample(row, 2, mask, values, torch.zeros(len(mask)))


def turn(segment: int, index: int, reward: float = 1.0, n: int = 2, **flags: bool) -> FakeSample:
    return one(TurnRow(segment, index, turns=(TurnSpan(0, n, reward),), **flags), [1] * n)


def state(segment: int, index: int, value: float = 2.0) -> FakeSample:
    return one(TurnRow(segment, index, TurnKind.BOOTSTRAP), [0], [value])


@pytest.mark.parametrize("seed", range(40))
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


def test_an_episode_of_400_turns_agrees_with_the_definition() -> None:
    rng = random.Random(0)
    samples = [turn(3, k, rng.gauss(0, 1), rng.randint(1, 9)) for k in range(400)] + [state(3, 400)]
    rng.shuffle(samples)
    data = run(samples)
    for got, (advantages, _) in zip(data["advantages"], expected(samples, make_args()), strict=True):
        torch.testing.assert_close(got.double(), advantages, atol=1e-5, rtol=0)


def test_many_turns_per_sample_give_the_same_as_one_turn_per_sample() -> None:
    apart = [turn(1, 0, 0.5, 3), turn(1, 1, -1.0, 2), turn(1, 2, 2.0, 4, terminated=True)]
    spans, at = [], 0
    for sample in apart:
        size = len(sample.mask)
        spans.append(TurnSpan(at, at + size, sample.row.turns[0].reward))
        at += size + 3
    mask = [1] * 3 + [0] * 3 + [1] * 2 + [0] * 3 + [1] * 4 + [0] * 3
    together = one(TurnRow(1, 0, terminated=True, turns=tuple(spans)), mask)
    parts = run(apart)["advantages"]
    whole = run([together])["advantages"][0]
    torch.testing.assert_close(whole[torch.tensor(mask).bool()], torch.cat(parts))


def test_the_actors_loss_gets_the_staleness_of_each_token_and_the_critics_does_not() -> None:
    spans = (TurnSpan(0, 2, 1.0, staleness=3), TurnSpan(4, 5, 2.0, staleness=0))
    samples = [one(TurnRow(0, 0, terminated=True, turns=spans), [1, 1, 0, 0, 1]), turn(1, 0), state(1, 1)]
    data = run(samples, policy_loss="dis", slime_verlog_role="actor")
    assert [row.tolist() for row in data[STALENESS]] == [[3, 3, -1, -1, 0], [-1, -1], [-1]]
    for changes in ({"slime_verlog_role": "critic", "policy_loss": "dis"}, {"slime_verlog_role": "actor"}):
        assert STALENESS not in run(samples, **changes)


@pytest.mark.parametrize("gap", [0, 1, 50])
def test_the_length_of_the_observation_between_turns_does_not_matter(gap: int) -> None:
    spans = (TurnSpan(0, 3, 1.0), TurnSpan(3 + gap, 5 + gap, 2.0))
    mask = [1] * 3 + [0] * gap + [1] * 2
    values = [0.1, 0.2, 0.3] + [99.0] * gap + [0.4, 0.5]
    sample = one(TurnRow(0, 0, terminated=True, turns=spans), mask, values)
    got = run([sample], gamma_token=0.9, lambda_token=0.8)["advantages"][0][torch.tensor(mask).bool()]
    flat = one(
        TurnRow(0, 0, terminated=True, turns=(TurnSpan(0, 3, 1.0), TurnSpan(3, 5, 2.0))),
        [1] * 5,
        [*values[:3], 0.4, 0.5],
    )
    torch.testing.assert_close(got, run([flat], gamma_token=0.9, lambda_token=0.8)["advantages"][0])


def test_the_reward_falls_on_the_last_trained_token() -> None:
    sample = one(TurnRow(0, 0, terminated=True, turns=(TurnSpan(0, 3, 1.0),)), [1, 1, 0], [0.0, 0.0, 7.0])
    got = run([sample], gamma_token=0.5)["advantages"][0]
    assert got.tolist() == [0.5, 1.0, 0.0]


def test_a_masked_turn_passes_on_value_and_reward_without_being_trained_on() -> None:
    samples = [turn(0, 0), turn(0, 1, 5.0), turn(0, 2, 1.0, terminated=True)]
    masked = [samples[0], replace(samples[1], mask=[0, 0]), samples[2]]
    plain, quiet = run(samples), run(masked)
    assert quiet["advantages"][1].tolist() == quiet["returns"][1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(quiet["advantages"][0], plain["advantages"][0])


def test_a_turn_without_reward_stays_a_separate_turn() -> None:
    got = run([turn(0, 0, 0.0), turn(0, 1, 1.0, terminated=True)], lambda_step=0.0)["returns"]
    torch.testing.assert_close(got[0], torch.tensor([0.99 * 0.5] * 2))


def test_termination_ends_value_even_when_a_limit_was_hit_at_the_same_time() -> None:
    for flags in ({"terminated": True}, {"terminated": True, "truncated": True}):
        got = run([turn(0, 0, 1.0, **flags), state(0, 1)])["returns"][0]
        torch.testing.assert_close(got, torch.ones(2))


def test_a_time_limit_bootstraps_only_where_the_converter_left_a_bootstrap_sample() -> None:
    assert run([turn(0, 0, 1.0, truncated=True)])["returns"][0].tolist() == [1.0, 1.0]
    got = run([turn(0, 0, 1.0, truncated=True), state(0, 1, 2.0)])["returns"]
    torch.testing.assert_close(got[0], torch.full((2,), 1.0 + 0.99 * 2.0))
    assert got[1].tolist() == [0.0]


def test_when_every_episode_is_cut_every_one_bootstraps_from_its_own_state() -> None:
    data = run([turn(k, 4, 0.0) for k in range(5)] + [state(k, 5, float(k)) for k in range(5)])
    for k in range(5):
        torch.testing.assert_close(data["returns"][k], torch.full((2,), 0.99 * k))


def test_when_every_episode_ends_on_its_first_turn_returns_are_rewards() -> None:
    data = run([turn(k, 0, float(k), terminated=True) for k in range(5)])
    assert [row.tolist() for row in data["returns"]] == [[float(k)] * 2 for k in range(5)]


def test_kl_is_charged_only_on_trained_tokens() -> None:
    sample = one(TurnRow(0, 0, terminated=True, turns=(TurnSpan(0, 3, 0.0),)), [1, 0, 1], [0.0] * 3)
    data = rollout_data([replace(sample, kl=torch.tensor([1.0, 100.0, 3.0]))])
    compute_advantages(make_args(kl_coef=0.5), data)
    assert data["returns"][0].tolist() == [-2.0, 0.0, -1.5]


class _Counter(TorchDispatchMode):
    """Counts what is handed to torch, and how often a number is read back from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += "_local_scalar_dense" in func._schema.name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["dual", "token", "turn", "bi_level"])
def test_operations_and_host_synchronisations_do_not_grow_with_the_samples(form: str) -> None:
    counts = []
    for episodes in (3, 30):
        samples = [turn(e, k, n=2 + k) for e in range(episodes) for k in range(4)]
        samples += [state(e, 4) for e in range(episodes)]
        with _Counter() as counter:
            run(samples, gae_form=form, value_first_token_weight=3.0)
        # The batch is made inside, with a few operations per sample: take those out.
        with _Counter() as making:
            rollout_data(samples)
        counts.append((counter.operations - making.operations, counter.reads - making.reads))
    assert counts[0] == counts[1]


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
        ([turn(7, 0, truncated=True), turn(7, 1, terminated=True)], r"segment 7, turn 0: it ended the episode"),
        ([state(7, 0), turn(7, 1, terminated=True)], r"segment 7, turn 0: a bootstrap sample is followed"),
        ([replace(state(7, 0), mask=[1])], r"sample 0: its loss mask includes token 0 .* belongs to no turn"),
    ],
)
def test_turns_that_do_not_form_an_episode_are_named(samples: list[FakeSample], message: str) -> None:
    with pytest.raises(TurnTableError, match=message):
        run(samples)


def test_a_bootstrap_sample_without_a_token_is_refused() -> None:
    empty = FakeSample(TurnRow(0, 1, TurnKind.BOOTSTRAP), 2, [], torch.zeros(0), torch.zeros(0))
    with pytest.raises(TurnTableError, match="sample 1: a bootstrap sample needs one response token"):
        run([turn(0, 0), empty])


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


def test_a_batch_without_values_names_the_flag() -> None:
    data = rollout_data([turn(0, 0, terminated=True)])
    del data["values"]
    with pytest.raises(TurnTableError, match="--advantage-estimator ppo"):
        compute_advantages(make_args(), data)


def test_a_mask_of_the_wrong_length_is_refused_with_its_sample() -> None:
    data = rollout_data([turn(0, 0, terminated=True)])
    data["loss_masks"] = [torch.ones(3, dtype=torch.int)]
    with pytest.raises(TurnTableError, match="sample 0: its loss mask has 3 entries for 2 response tokens"):
        compute_advantages(make_args(), data)


def test_a_table_with_too_few_rows_is_refused() -> None:
    data = rollout_data([turn(0, 0, terminated=True)])
    data["prompt"] = [encode_row(turn(0, 0).row)] * 2
    with pytest.raises(TurnTableError, match="2 rows for 1 samples"):
        compute_advantages(make_args(), data)
