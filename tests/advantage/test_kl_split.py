"""KL of reasoning and action tokens separately, and the action-hacking warning with its error rates."""

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import advantage.group
import advantage.hook
import advantage.kl_split
from advantage.errors import TurnTableError
from advantage.hook import compute_advantages
from advantage.kl_split import FALSE_ALARMS, ActionHackingWatch, KlSplit, log_kl_split
from advantage.ranks import Layout
from advantage.settings import KL_SPLIT, AdvantageSettings
from advantage.turn_table import TurnRow, TurnSpan, encode_row
from tests.advantage.batches import make_args, make_samples, rollout_data

PATIENCE = AdvantageSettings().action_hacking_patience


def data_of(kl: list[float], mask: list[int], *spans: tuple[int, int, int]) -> dict[str, Any]:
    row = TurnRow(0, 0, terminated=True, turns=tuple(TurnSpan(a, b, 0.0, action) for a, b, action in spans))
    return {
        "prompt": [encode_row(row)],
        "kl": [torch.tensor(kl)],
        "loss_masks": [torch.tensor(mask)],
        "response_lengths": [len(mask)],
        "total_lengths": [len(mask) + 2],
    }


def test_action_tokens_start_at_the_action_and_masked_tokens_are_left_out() -> None:
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
    notes = lambda j, s: any(not t.moves and t.start <= j < t.end for t in s.row.turns)
    acts = lambda j, s: any(0 <= t.action_start <= j < t.end for t in s.row.turns)
    action = [float(s.kl[j]) for j, s in flat if acts(j, s) and not notes(j, s)]
    reasoning = [float(s.kl[j]) for j, s in flat if not acts(j, s) and not notes(j, s)]
    assert split.summary_tokens == len(flat) - len(action) - len(reasoning) > 0
    assert split.action_tokens == len(action) and split.reasoning_tokens == len(reasoning)
    assert split.action == pytest.approx(sum(action) / len(action), abs=1e-6)
    assert split.reasoning == pytest.approx(sum(reasoning) / len(reasoning), abs=1e-6)


def test_a_table_that_the_advantage_hook_already_took_is_a_named_error() -> None:
    samples = make_samples(random.Random(2), 2)
    data = rollout_data(samples)
    compute_advantages(make_args(), data)
    with pytest.raises(TurnTableError, match="no turn table"):
        log_kl_split(make_args(), 0, data)


@pytest.mark.parametrize("hook", [advantage.hook, advantage.group])
def test_on_an_earlier_pipeline_stage_the_hook_leaves_the_table_to_the_split(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hook, advantage.kl_split):
        monkeypatch.setattr(module, "current_layout", lambda: Layout(last_stage=False))
    args, data = make_args(rollout_data_postprocess_path=KL_SPLIT), data_of([0.0], [1], (0, 1, -1))
    hook.compute_advantages(args, data)
    assert log_kl_split(args, 0, data) is None
    assert "prompt" not in data and "advantages" not in data


def test_without_kl_in_reward_the_log_ratio_to_the_reference_is_split() -> None:
    data = data_of([0.0, 0.0], [1, 1], (0, 2, 1))
    data |= {"log_probs": [torch.tensor([-1.0, -2.0])], "ref_log_probs": [torch.tensor([-1.5, -4.0])]}
    assert log_kl_split(make_args(kl_coef=0.0), 0, data) == KlSplit(0.5, 2.0, 1, 1)


def test_without_a_reference_nothing_is_logged_and_the_table_is_still_taken_out() -> None:
    data = data_of([0.0], [1], (0, 1, -1))
    assert log_kl_split(make_args(kl_coef=0.0), 0, data) is None
    assert set(data) == {"kl", "loss_masks", "response_lengths", "total_lengths"}


def test_a_framework_without_data_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert log_kl_split(make_args()) is None and log_kl_split(make_args()) is None
    assert [record.message for record in caplog.records] == [
        "this framework gives --rollout-data-postprocess-path no data, so KL is not split"
    ]


def test_a_mean_over_no_tokens_is_left_out_and_not_logged_as_zero() -> None:
    data = data_of([1.0, 3.0], [1, 1], (0, 2, -1))
    assert log_kl_split(make_args(), 0, data) == KlSplit(2.0, None, 2, 0)
    assert data["kl_reasoning"].item() == 2.0 and "kl_action" not in data


def watched(levels: Iterable[tuple[float, float]], patience: int = PATIENCE) -> int | None:
    """Feed (reasoning, action) KLs of successive updates; return the first update with a warning."""
    watch = ActionHackingWatch()
    for update, (reasoning, action) in enumerate(levels):
        if watch.update(KlSplit(reasoning, action, 10, 10), patience) >= 1 / FALSE_ALARMS:
            return update
    return None


def walks(rng: random.Random, updates: int) -> Iterator[tuple[float, float]]:
    reasoning = action = 0.0
    for _ in range(updates):
        reasoning, action = reasoning + rng.gauss(0, 1), action + rng.gauss(0, 1)
        yield reasoning, action


def growth(
    reasoning: float, action: float, noise: float = 0.0, onset: int = 0
) -> Callable[[random.Random, int], Iterator[tuple[float, float]]]:
    """Levels that grow by these steps per update from `onset` on, each measured with independent noise."""

    def levels(rng: random.Random, updates: int) -> Iterator[tuple[float, float]]:
        for t in range(updates):
            late = max(0, t - onset)
            yield reasoning * late + rng.gauss(0, noise), action * late + rng.gauss(0, noise)

    return levels


def share_warned(levels: Callable[[random.Random, int], Iterable], updates: int = 300, runs: int = 400) -> float:
    rng = random.Random(0)
    return sum(watched(levels(rng, updates)) is not None for _ in range(runs)) / runs


@pytest.mark.parametrize("updates", [100, 300, 1000])
def test_independent_random_walks_warn_in_at_most_one_run_in_twenty_however_long(updates: int) -> None:
    assert share_warned(walks, updates) <= FALSE_ALARMS


@pytest.mark.parametrize("patience", [1, 2, 5, 10])
def test_the_false_alarm_rate_holds_at_any_patience(patience: int) -> None:
    rng = random.Random(1)
    assert sum(watched(walks(rng, 300), patience) is not None for _ in range(400)) <= 400 * FALSE_ALARMS


def test_noise_around_a_level_or_around_a_common_growth_hardly_ever_warns() -> None:
    assert share_warned(growth(0, 0, noise=1)) <= FALSE_ALARMS
    assert share_warned(growth(1, 1.2, noise=3)) <= FALSE_ALARMS


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.2, 1.9])
def test_actions_that_grow_a_little_faster_than_reasoning_are_not_reported(ratio: float) -> None:
    assert watched(growth(0.01, 0.01 * ratio)(random.Random(0), 1000)) is None


def test_actions_that_outgrow_reasoning_are_reported_within_30_updates_and_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert watched(growth(0.01, 0.1)(random.Random(0), 100)) == 29
    assert watched(growth(0.0, 0.1)(random.Random(0), 100)) == 29
    caplog.clear()
    watch = ActionHackingWatch()
    with caplog.at_level(logging.WARNING):
        for t in range(60):
            watch.update(KlSplit(0.01 * t, 0.1 * t, 10, 10), PATIENCE)
    assert [record.message[:15] for record in caplog.records] == ["action hacking?"] * 2


@pytest.mark.parametrize("onset", [0, 150])
def test_growth_of_three_times_the_reasonings_is_found_through_noise_in_nine_of_ten_runs(onset: int) -> None:
    assert share_warned(growth(1, 3, noise=1, onset=onset)) >= 0.9


def test_shrinking_kl_is_not_hacking_even_if_reasoning_shrinks_faster() -> None:
    assert watched((10 - 0.1 * t, 10 - 0.01 * t) for t in range(100)) is None


def test_updates_that_lack_action_or_reasoning_tokens_are_skipped() -> None:
    with_gaps, without = ActionHackingWatch(), ActionHackingWatch()
    for t in range(40):
        split = KlSplit(0.01 * t, 0.1 * t, 10, 10)
        with_gaps.update(KlSplit(5.0, None, 10, 0), 3)
        with_gaps.update(KlSplit(None, 5.0, 0, 10), 3)
        assert with_gaps.update(split, 3) == without.update(split, 3)
