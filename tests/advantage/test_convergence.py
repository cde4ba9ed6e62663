"""The trend test at the end of the critic's warm-up, with simulated error rates."""

import logging
import math
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from advantage.critic import SIGNIFICANCE, find_trend, warmup_losses, watch_warmup
from advantage.ranks import Group
from advantage.settings import AdvantageSettings
from tests.fixtures.warm_python import WARM


def run(losses: list[float], args: Namespace, data: dict[str, Any] | None = None, group: Group | None = None) -> list:
    """Feed batches of two trained tokens and one masked one, with these mean squared errors."""
    mask = torch.tensor([True, False, True])
    errors = [torch.tensor([loss**0.5, 77.0, -(loss**0.5)], dtype=torch.float64) for loss in losses]
    zeros = torch.zeros(3, dtype=torch.float64)
    return [watch_warmup(args, data or {}, zeros, error, mask, group or Group()) for error in errors]


def make(updates: int = 8, **more: Any) -> Namespace:
    return Namespace(num_critic_only_steps=updates, start_rollout_id=0, **more)


def simulate(rng: random.Random, updates: int, change: float, noise: str) -> list[float]:
    """Losses that change by the factor 1 + `change` per update, with independent noise of 30 %."""
    draw = {
        "normal": lambda: max(1 + 0.3 * rng.gauss(0, 1), 0.01),
        "lognormal": lambda: math.exp(0.3 * rng.gauss(0, 1)),
        "skewed": lambda: 0.7 + 0.3 * rng.expovariate(1.0),
    }[noise]
    return [(1 + change) ** t * draw() for t in range(updates)]


def warned(losses: list[float]) -> bool:
    trend = find_trend(losses)
    tolerance = AdvantageSettings().critic_warmup.tolerance
    return trend is not None and trend.chance <= SIGNIFICANCE and abs(trend.change) > tolerance


def share_warned(updates: int, change: float, noise: str, runs: int = 2000) -> float:
    rng = random.Random(f"{updates} {change} {noise}")
    return sum(warned(simulate(rng, updates, change, noise)) for _ in range(runs)) / runs


@pytest.mark.parametrize("noise", ["normal", "lognormal", "skewed"])
@pytest.mark.parametrize("updates", [8, 16, 20, 45, 100])
def test_at_most_one_in_twenty_settled_critics_is_warned_about(updates: int, noise: str) -> None:
    # Three standard errors of 2,000 runs at 5 % are 1.5 points.
    assert share_warned(updates, 0.0, noise) <= SIGNIFICANCE + 0.015


@pytest.mark.parametrize("noise", ["normal", "lognormal", "skewed"])
def test_a_fall_of_5_percent_per_update_over_45_updates_is_found_in_nine_of_ten_runs(noise: str) -> None:
    assert share_warned(45, -0.05, noise, runs=500) >= 0.9


def test_a_loss_that_fell_early_and_then_settled_is_not_warned_about() -> None:
    rng = random.Random(4)
    runs = [[(1 + 8 * math.exp(-t / 4)) * math.exp(0.3 * rng.gauss(0, 1)) for t in range(45)] for _ in range(1000)]
    assert sum(map(warned, runs)) / len(runs) <= SIGNIFICANCE + 0.02


def test_too_few_updates_say_nothing_however_the_loss_falls(caplog: pytest.LogCaptureFixture) -> None:
    falling = [0.5**t for t in range(15)]
    with caplog.at_level(logging.INFO):
        assert run(falling, make(15)) == [None] * 15
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "at least 16 are needed to tell a trend" in record.getMessage()


def test_the_change_is_that_of_the_second_half() -> None:
    trend = find_trend([7.0] * 10 + [0.9**t for t in range(10)])
    assert trend is not None and trend.change == pytest.approx(0.9**9 - 1) and trend.chance < 1e-3
    flat = find_trend([0.0] * 16)
    assert flat is not None and (flat.change, flat.chance) == (0.0, 1.0)


def test_a_falling_loss_is_warned_about_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judged = run([8 * 0.9**t for t in range(22)], make(20))
    assert judged[:19] == [None] * 19 and judged[19].change == pytest.approx(0.9**9 - 1) and judged[20:] == [None, None]
    (record,) = caplog.records
    assert "had not converged when its warm-up of 20 updates ended" in record.getMessage()
    assert "-61 %" in record.getMessage() and "lengthen critic_warmup" in record.getMessage()


def test_a_settled_loss_or_no_warm_up_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run([8.0, 4.0] + [1.0, 1.1] * 9, make(20))[-1].chance > 0.5
        assert run([8, 4, 2], make(0)) == [None] * 3
    assert not caplog.records


def test_the_yaml_sets_the_tolerated_change(caplog: pytest.LogCaptureFixture) -> None:
    run([8 * 0.9**t for t in range(20)], make(20, critic_warmup={"tolerance": 0.7}))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("args", "data"),
    [(make(), {"log_probs": []}), (make(use_rollout_logprobs=True), {}), (make(slime_verlog_role="actor"), {})],
    ids=["log_probs", "rollout_log_probs", "role"],
)
def test_the_actors_batches_are_ignored(args: Namespace, data: dict[str, Any]) -> None:
    assert run([8, 7, 6, 5, 4, 3, 2, 1], args, data) == [None] * 8
    assert not warmup_losses.of(args)


def test_the_critics_batches_are_watched_with_rollout_log_probs_too() -> None:
    args = make(use_rollout_logprobs=True, slime_verlog_role="critic")
    run([8, 7, 6, 5, 4, 3, 2, 1], args, {})
    assert len(warmup_losses.of(args)) == 8


def test_a_run_resumed_in_its_warm_up_tests_the_remaining_updates() -> None:
    args = Namespace(num_critic_only_steps=24, start_rollout_id=4)
    judged = run([0.9**t for t in range(21)], args)
    assert [k for k, trend in enumerate(judged) if trend is not None] == [19]
    assert run([1.0], Namespace(num_critic_only_steps=8, start_rollout_id=8)) == [None]


def test_the_loss_is_that_of_all_ranks(tmp_path: Path) -> None:
    mp.start_processes(_worker, args=(str(tmp_path),), nprocs=2, start_method=WARM)
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == [5.0, 5.0, 5.0, 5.0]


def _worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    args = make(4)
    run([2.0 + 6.0 * rank] * 4, args, group=Group(rank, 2, dist.group.WORLD))
    torch.save([round(loss, 9) for loss in warmup_losses.of(args)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()
