"""The critic's warm-up is judged at its end: settled, still moving, or too short to tell."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from advantage.convergence import relative_change, watch_warmup
from advantage.megatron.layout import Group


def run(losses: list[float], args: Namespace, data: dict[str, Any] | None = None, group: Group | None = None) -> list:
    """Feed batches of two trained tokens and one masked one, with these mean squared errors."""
    mask = torch.tensor([True, False, True])
    errors = [torch.tensor([loss**0.5, 77.0, -(loss**0.5)], dtype=torch.float64) for loss in losses]
    zeros = torch.zeros(3, dtype=torch.float64)
    return [watch_warmup(args, data or {}, zeros, error, mask, group or Group()) for error in errors]


def make(updates: int = 8, **more: Any) -> Namespace:
    return Namespace(num_critic_only_steps=updates, start_rollout_id=0, **more)


def test_quarters_are_compared() -> None:
    assert relative_change([9, 9, 9, 9, 4, 4, 1, 3]) == pytest.approx(-0.5)
    assert relative_change([1.0, 2.0, 3.0, 6.0]) == pytest.approx(1.0)
    assert relative_change([1.0, 2.0, 3.0]) is None
    assert relative_change([0.0, 0.0, 0.0, 0.0]) == 0.0


def test_a_falling_loss_is_warned_about_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judged = run([8, 7, 6, 5, 4, 4, 2, 2, 1, 1], make())
    assert judged[:7] == [None] * 7 and judged[7] == pytest.approx(-0.5) and judged[8:] == [None, None]
    (record,) = caplog.records
    assert "had not converged when its warm-up of 8 updates ended" in record.getMessage()
    assert "-50 %" in record.getMessage() and "lengthen critic_warmup" in record.getMessage()


def test_a_settled_loss_and_a_short_warm_up_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run([8, 4, 2, 1, 1, 1, 1, 1.1], make())[-1] == pytest.approx(0.05)
        assert run([8, 4, 2], make(3)) == [None] * 3
        assert run([8, 4, 2], make(0)) == [None] * 3
    assert not caplog.records


@pytest.mark.parametrize("given", [{"tolerance": 0.6}, Namespace(tolerance=0.6)], ids=["mapping", "dataclass"])
def test_the_yaml_sets_how_much_may_still_move(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    run([8, 8, 8, 8, 4, 4, 2, 2], make(critic_warmup=given))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("args", "data"),
    [(make(), {"log_probs": []}), (make(use_rollout_logprobs=True), {})],
    ids=["log_probs", "rollout_log_probs"],
)
def test_the_actors_batches_are_not_looked_at(args: Namespace, data: dict[str, Any]) -> None:
    assert run([8, 7, 6, 5, 4, 3, 2, 1], args, data) == [None] * 8
    assert not hasattr(args, "critic_warmup_losses")


def test_a_run_resumed_in_its_warm_up_judges_what_is_left_of_it() -> None:
    args = Namespace(num_critic_only_steps=8, start_rollout_id=4)
    assert run([4, 4, 4, 2, 1], args) == [None, None, None, pytest.approx(-0.5), None]
    assert run([1.0], Namespace(num_critic_only_steps=8, start_rollout_id=8)) == [None]


def test_the_loss_is_that_of_all_ranks(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(str(tmp_path),), nprocs=2)
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == [5.0, 5.0, 5.0, 5.0]


def _worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    args = make(4)
    run([2.0 + 6.0 * rank] * 4, args, group=Group(rank, 2, dist.group.WORLD))
    torch.save([round(loss, 9) for loss in args.critic_warmup_losses], f"{folder}/{rank}.pt")
    dist.destroy_process_group()
