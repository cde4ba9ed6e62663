"""Critic warm-up with replay in the whole loop: who trains, what is played, and which critic the
targets come from."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

import embedded.trainer.ppo as trainer_module
from embedded.train import train
from embedded.trainer.ppo import PpoTrainer
from tests.embedded.test_train import Recorder, maker

W_EPOCH, W_ITER = 2, 2


@pytest.fixture
def args(policy_folder: Path, tmp_path: Path) -> Any:
    keys = {"critic_warmup": {"w_epoch": W_EPOCH, "w_iter": W_ITER, "fraction": 1.0}}
    warmup = W_EPOCH + W_ITER
    return maker(policy_folder, tmp_path)(
        keys, num_rollout=warmup + 1, num_critic_only_steps=warmup
    )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The policy after every update, and the critic's values and targets in every update."""
    seen: dict[str, list[Any]] = {"policies": [], "targets": []}
    step, advantages = PpoTrainer.train, trainer_module.add_advantages

    def after(self: PpoTrainer, rollout_id: int, data: dict[str, Any]) -> dict[str, float]:
        if not seen["policies"]:
            seen["policies"].append({k: v.clone() for k, v in self.policy_state().items()})
        metrics = step(self, rollout_id, data)
        seen["policies"].append({k: v.clone() for k, v in self.policy_state().items()})
        return metrics

    def record(args: Any, data: dict[str, Any]) -> None:
        advantages(args, data)
        if "log_probs" not in data:
            turns = {
                tuple(t.tolist()): v for t, v in zip(data["tokens"], data["values"], strict=True)
            }
            seen["targets"].append((turns, [r.clone() for r in data["returns"]]))

    monkeypatch.setattr(PpoTrainer, "train", after)
    monkeypatch.setattr(trainer_module, "add_advantages", record)
    return seen


def test_batches_are_kept_then_drawn_with_new_targets_while_the_actor_stays_bit_identical(
    args: Any, watched: Any
) -> None:
    recorder = Recorder()
    train(args, recorder)
    metrics = [row for _, row in recorder.updates]
    assert [row.get("warmup/kept_turns") for row in metrics] == [12, 24, None, None, None]
    assert [row.get("warmup/drawn_turns") for row in metrics] == [None, None, 24, 24, None]
    assert ["rollout/turns" in row for row in metrics] == [True, True, False, False, True]
    assert [row["train/actor_trains"] for row in metrics] == [0, 0, 0, 0, 1]
    assert all("critic/value_loss" in row for row in metrics)
    first, last = watched["policies"][0], watched["policies"][-1]
    for policy in watched["policies"][1:-1]:
        assert all(torch.equal(policy[name], weight) for name, weight in first.items())
    assert any(not torch.equal(last[name], weight) for name, weight in first.items())
    (third, third_returns), (fourth, fourth_returns) = watched["targets"][2:4]
    # The same kept turns in both draws, but never the same values, and so other targets.
    assert third.keys() == fourth.keys()
    assert all(not torch.equal(values, fourth[turn]) for turn, values in third.items())
    total = lambda rows: sum(float(row.sum()) for row in rows)
    assert total(third_returns) != pytest.approx(total(fourth_returns), abs=1e-6)
