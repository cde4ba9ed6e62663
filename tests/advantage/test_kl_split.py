"""KL of reasoning and action tokens separately."""

import random
from collections import defaultdict
from statistics import mean
from typing import Any

import pytest
import torch

import advantage.group
import advantage.kl_split
from advantage.errors import TurnTableError
from advantage.exchange import Layout
from advantage.kl_split import log_kl_split
from advantage.settings import KL_SPLIT
from advantage.turn_table import TurnRow, TurnSpan, encode_row
from tests.advantage.batches import make_args, make_samples, run


def data_of(kl: list[float], mask: list[int], *spans: tuple[int, int, int]) -> dict[str, Any]:
    row = TurnRow(
        0, 0, terminated=True, turns=tuple(TurnSpan(a, b, 0.0, action) for a, b, action in spans)
    )
    return {
        "prompt": [encode_row(row)],
        "kl": [torch.tensor(kl)],
        "loss_masks": [torch.tensor(mask)],
        "response_lengths": [len(mask)],
        "total_lengths": [len(mask) + 2],
    }


def logged(data: dict[str, Any]) -> dict[str, float]:
    return {key: value.item() for key, value in data.items() if key.startswith("kl_")}


def test_what_is_masked_may_be_nan_or_infinite() -> None:
    nan, infinite = float("nan"), float("inf")
    data = data_of([1.0, 30.0, 50.0, nan, infinite, 3.0], [1, 1, 1, 0, 0, 1], (0, 4, 1), (5, 6, -1))
    log_kl_split(make_args(), 0, data)
    assert logged(data) == {"kl_reasoning": 2.0, "kl_action": 40.0}


def test_it_runs_after_the_advantage_hook_on_the_table_that_the_hook_left() -> None:
    samples = make_samples(random.Random(2), 6)
    data = run(samples, rollout_data_postprocess_path=KL_SPLIT)
    log_kl_split(make_args(), 7, data)
    kl = defaultdict[str, list[float]](list)
    for sample in samples:
        for j in (j for j, trained in enumerate(sample.mask) if trained):
            (turn,) = (turn for turn in sample.row.turns if turn.start <= j < turn.end)
            acts = 0 <= turn.action_start <= j
            kind = ("action" if acts else "reasoning") if turn.moves else "summary"
            kl[f"kl_{kind}"].append(float(sample.kl[j]))
    assert logged(data) == pytest.approx({kind: mean(rows) for kind, rows in kl.items()}, abs=1e-6)


def test_a_table_that_the_advantage_hook_already_took_is_a_named_error() -> None:
    samples = make_samples(random.Random(2), 2)
    data = run(samples)
    with pytest.raises(TurnTableError, match="no turn table"):
        log_kl_split(make_args(), 0, data)


def test_on_an_earlier_pipeline_stage_the_hook_leaves_the_table_to_the_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For estimators without a critic; tests/advantage/test_layouts.py has those with one."""
    for module in (advantage.group, advantage.kl_split):
        monkeypatch.setattr(module, "current_layout", lambda: Layout(last_stage=False))
    args, data = make_args(rollout_data_postprocess_path=KL_SPLIT), data_of([0.0], [1], (0, 1, -1))
    advantage.group.compute_advantages(args, data)
    log_kl_split(args, 0, data)
    assert not logged(data)
    assert "prompt" not in data and "advantages" not in data


def test_without_kl_in_reward_the_log_ratio_to_the_reference_is_split() -> None:
    data = data_of([0.0, 0.0], [1, 1], (0, 2, 1))
    data |= {
        "log_probs": [torch.tensor([-1.0, -2.0])],
        "ref_log_probs": [torch.tensor([-1.5, -4.0])],
    }
    log_kl_split(make_args(kl_coef=0.0), 0, data)
    assert logged(data) == {"kl_reasoning": 0.5, "kl_action": 2.0}


def test_without_a_reference_nothing_is_logged_and_the_table_is_still_taken_out() -> None:
    data = data_of([0.0], [1], (0, 1, -1))
    log_kl_split(make_args(kl_coef=0.0), 0, data)
    assert set(data) == {"kl", "loss_masks", "response_lengths", "total_lengths"}


def test_a_mean_over_no_tokens_is_left_out_and_not_logged_as_zero() -> None:
    data = data_of([1.0, 3.0], [1, 1], (0, 2, -1))
    log_kl_split(make_args(), 0, data)
    assert logged(data) == {"kl_reasoning": 2.0}
