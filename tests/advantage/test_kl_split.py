"""KL of reasoning and of action tokens apart, and the warning when actions run away from reasoning."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from advantage import kl_split
from advantage.errors import TurnTableError
from advantage.hook import KL_SPLIT, compute_advantages
from advantage.kl_split import ActionHackingWatch, KlSplit, log_kl_split
from advantage.turn_table import TurnRow, TurnSpan, encode_row
from tests.advantage.batches import make_args, make_samples, rollout_data


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    kl_split.reset()
    yield
    kl_split.reset()


def data_of(kl: list[float], mask: list[int], *spans: tuple[int, int, int]) -> dict[str, Any]:
    row = TurnRow(0, 0, terminated=True, turns=tuple(TurnSpan(a, b, 0.0, action) for a, b, action in spans))
    return {
        "prompt": [encode_row(row)],
        "kl": [torch.tensor(kl)],
        "loss_masks": [torch.tensor(mask)],
        "response_lengths": [len(mask)],
        "total_lengths": [len(mask) + 2],
    }


def test_tokens_from_the_action_on_are_the_actions_and_masked_ones_are_nobodys() -> None:
    data = data_of([1.0, 2.0, 30.0, 50.0, 99.0, 99.0, 3.0], [1, 1, 1, 1, 0, 0, 1], (0, 5, 2), (6, 7, -1))
    split = log_kl_split(make_args(), 0, data)
    assert split == KlSplit(2.0, 40.0, 3, 2)
    assert data["kl_reasoning"].item() == 2.0 and data["kl_action"].item() == 40.0
    assert "prompt" not in data


def test_it_runs_after_the_advantage_hook_on_the_table_that_the_hook_left() -> None:
    samples = make_samples(random.Random(2), 6)
    args, data = make_args(rollout_data_postprocess_path=KL_SPLIT), rollout_data(samples)
    compute_advantages(args, data)
    split = log_kl_split(args, 7, data)
    flat = [(j, s) for s in samples for j in range(len(s.mask)) if s.mask[j]]
    acts = lambda j, s: any(0 <= t.action_start <= j < t.end for t in s.row.turns)
    action = [float(s.kl[j]) for j, s in flat if acts(j, s)]
    reasoning = [float(s.kl[j]) for j, s in flat if not acts(j, s)]
    assert split.action_tokens == len(action) and split.reasoning_tokens == len(reasoning)
    assert split.action == pytest.approx(sum(action) / len(action), abs=1e-6)
    assert split.reasoning == pytest.approx(sum(reasoning) / len(reasoning), abs=1e-6)


def test_a_table_that_the_advantage_hook_already_took_is_a_named_error() -> None:
    samples = make_samples(random.Random(2), 2)
    data = rollout_data(samples)
    compute_advantages(make_args(), data)
    with pytest.raises(TurnTableError, match="no turn table"):
        log_kl_split(make_args(), 0, data)


def test_without_kl_in_reward_the_log_ratio_to_the_reference_is_split() -> None:
    data = data_of([0.0, 0.0], [1, 1], (0, 2, 1))
    data |= {"log_probs": [torch.tensor([-1.0, -2.0])], "ref_log_probs": [torch.tensor([-1.5, -4.0])]}
    assert log_kl_split(make_args(kl_coef=0.0), 0, data) == KlSplit(0.5, 2.0, 1, 1)


def test_without_a_reference_nothing_is_logged_and_the_table_is_still_taken_out() -> None:
    data = data_of([0.0], [1], (0, 1, -1))
    assert log_kl_split(make_args(kl_coef=0.0), 0, data) is None
    assert set(data) == {"kl", "loss_masks", "response_lengths", "total_lengths"}


def test_a_framework_that_hands_over_no_data_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert log_kl_split(make_args()) is None and log_kl_split(make_args()) is None
    assert [record.message for record in caplog.records] == [
        "this framework gives --rollout-data-postprocess-path no data, so KL is not split"
    ]


def test_actions_that_outgrow_reasoning_for_long_enough_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    watch = ActionHackingWatch()
    with caplog.at_level(logging.WARNING):
        streaks = [watch.update(KlSplit(0.01 * t, 0.1 * t, 10, 10), patience=3) for t in range(7)]
    assert streaks == [0, 1, 2, 3, 4, 5, 6]
    assert [record.message[:15] for record in caplog.records] == ["action hacking?"] * 2


def test_reasoning_that_keeps_up_ends_the_streak(caplog: pytest.LogCaptureFixture) -> None:
    watch = ActionHackingWatch()
    for reasoning, action in [(0.0, 0.0), (0.0, 0.1), (0.0, 0.2), (0.5, 0.3), (0.5, 0.4)]:
        streak = watch.update(KlSplit(reasoning, action, 10, 10), patience=3)
    assert streak == 1 and not caplog.records


def test_shrinking_kl_is_no_hacking_even_if_reasoning_shrinks_faster() -> None:
    watch = ActionHackingWatch()
    for reasoning, action in [(1.0, 1.0), (0.5, 0.9), (0.0, 0.8)]:
        streak = watch.update(KlSplit(reasoning, action, 10, 10), patience=3)
    assert streak == 0
