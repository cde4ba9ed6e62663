"""What the trainer does with its critic: first tokens, several updates per batch, and frozen
attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from advantage.settings import ATTENTION
from embedded.trainer.batches import micro_batches, to_rollout_data
from embedded.trainer.ppo import PpoTrainer, add_advantages
from rollout.errors import CheckpointError, ConfigError
from tests.embedded.conftest import BINS, made_up_batch
from tests.embedded.trainer.test_trainer import make as make  # a fixture
from tests.embedded.trainer.test_trainer import same, weights
from tests.fixtures.metrics_page import unexplained


def test_a_critic_update_weighs_first_tokens_and_divides_by_the_groups_tokens(make: Any) -> None:
    """Oracle: the loss that the first step reports, from the batch alone (V = 0, so returns are
    lambda-returns)."""
    batch = made_up_batch(turns=4)
    metrics = make().train(0, batch)
    expected, ahead = 0.0, 0.0
    for i in reversed(range(4)):
        ahead = batch["rewards"][i] + (0.0 if i in (1, 3) else 0.99 * 0.95 * ahead)
        n = batch["response_lengths"][i]
        expected += ahead**2 * (n - 1 + 3.0) / n / 4
    assert metrics["critic/value_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_critic_trains_several_times_on_a_batch_with_the_returns_and_values_from_before(
    make: Any,
) -> None:
    """Oracle: the same batch given twice to a trainer whose values, returns and learning rate do
    not change."""
    batch = made_up_batch()
    twice, by_hand = make(critic_updates=2), make()
    kept = weights(twice)
    metrics = twice.train(0, batch)
    data = by_hand_critic_data(by_hand, batch)
    for last in (False, True):
        by_hand._optimize(by_hand.critic, by_hand.critic_optimizer, data, by_hand._value_loss, last)
    assert same(weights(twice, "critic"), weights(by_hand, "critic"))
    once = make()
    assert once.train(0, batch)["critic/value_mean"] == metrics["critic/value_mean"]
    assert same(weights(once), weights(twice)) and not same(kept, weights(twice)), (
        "the actor's update is unchanged"
    )
    rates = [trainer.critic_optimizer.param_groups[0]["lr"] for trainer in (once, twice)]
    assert rates[0] == rates[1], "the schedule advances once per batch"


def by_hand_critic_data(trainer: PpoTrainer, batch: dict[str, Any]) -> Any:
    data = to_rollout_data(batch, trainer.device)
    data["values"] = trainer._values(data, micro_batches(data, range(len(data["tokens"])), 8192))
    add_advantages(trainer.args, data)
    return data


def test_the_actor_can_use_the_values_from_after_the_critics_update(make: Any) -> None:
    """Oracle: a trained copy of the critic. Only the actor's update differs; the critic's does
    not."""
    batch, lambdas = made_up_batch(), {"normalize_advantages": False}
    before, after = make(**lambdas), make(actor_values="after", **lambdas)
    seen: list[Any] = []
    kept = after._train_actor
    after._train_actor = lambda rollout_id, data: (
        seen.append(data["values"]),
        kept(rollout_id, data),
    )[1]
    before.train(0, batch)
    after.train(0, batch)
    assert same(weights(before, "critic"), weights(after, "critic"))
    assert not same(weights(before), weights(after))
    data = to_rollout_data(batch, before.device)
    own = before._values(data, micro_batches(data, range(len(data["tokens"])), 8192))
    torch.testing.assert_close(torch.cat(seen[0]), torch.cat(own), atol=1e-5, rtol=0)


FROZEN = {"critic_frozen": [ATTENTION]}


def test_frozen_attention_of_the_critic_stays_bit_identical_and_the_rest_moves(make: Any) -> None:
    trainer = make(**FROZEN, weight_decay=0.1)
    old = {role: weights(trainer, role) for role in ("actor", "critic")}
    for step in range(3):
        trainer.train(step, made_up_batch(seed=step))
    new = {role: weights(trainer, role) for role in old}
    attention = {name for name in old["critic"] if "self_attention.linear" in name}
    assert attention
    still = {name for name, x in old["critic"].items() if torch.equal(x, new["critic"][name])}
    assert still == attention
    assert not any(torch.equal(x, new["actor"][name]) for name, x in old["actor"].items())


def test_a_pattern_that_freezes_nothing_is_refused_and_so_is_a_resume_with_another_list(
    make: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'atention' matches none of the critic's parameters"):
        make(critic_frozen=["atention"])
    make(**FROZEN).save(str(tmp_path), 0)
    make(**FROZEN).load(str(tmp_path))
    with pytest.raises(CheckpointError, match="frozen parameters.*give the same critic_frozen"):
        make().load(str(tmp_path))


@pytest.mark.slow
def test_a_critic_with_bins_starts_at_zero_and_learns_the_returns_that_a_scalar_one_learns(
    make: Any,
) -> None:
    """Also in bf16, whose products move logits but not the head's own."""
    batch = made_up_batch()
    flags = {"lambda_critic": 1.0, "num_critic_only_steps": 99, "lr_decay_style": "constant"}
    for head in ({}, BINS, {**BINS, "bf16": True}):
        trainer = make(**flags, critic_lr=3e-3 if head else 1e-3, **head)
        rows = [trainer.train(step, batch) for step in range(40)]
        assert not unexplained(rows[0])
        assert rows[0]["critic/value_mean"] == pytest.approx(0, abs=1e-3)
        assert rows[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-3)
        assert rows[-1]["critic/explained_variance"] > 0.9, head
        assert ("critic/value_clipfrac" in rows[0]) == (not head)
        assert not head or rows[0]["critic/return_outside_share"] == 0


def test_a_critic_with_bins_resumes_bit_for_bit_and_another_head_is_refused(
    make: Any, tmp_path: Path
) -> None:
    straight, first = make(**BINS), make(**BINS)
    for step in range(4):
        straight.train(step, made_up_batch(seed=step))
    for step in range(2):
        first.train(step, made_up_batch(seed=step))
    first.save(str(tmp_path), 1)
    resumed = make(load=str(tmp_path))  # the YAML does not say: the head comes from the checkpoint
    resumed.load(str(tmp_path))
    for step in range(2, 4):
        resumed.train(step, made_up_batch(seed=step))
    for role in ("actor", "critic"):
        assert same(weights(straight, role), weights(resumed, role))
    for other in ({"value_loss": "mse"}, {**BINS, "value_range": [-1.0, 2.0]}):
        for folder in ("load", "critic_load"):
            with pytest.raises(
                ConfigError, match=f"the critic in {tmp_path} has the head value_loss: hl_gauss"
            ):
                make(**{folder: str(tmp_path)}, **other)
        with pytest.raises(ConfigError, match="which would start untrained"):
            make(**other).load(str(tmp_path))
