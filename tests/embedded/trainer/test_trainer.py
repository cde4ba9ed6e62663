"""The PPO trainer against plain loops over the same numbers, and what must never happen."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from embedded.trainer.batches import micro_batches, to_rollout_data
from embedded.trainer.ppo import PpoTrainer, add_advantages
from rollout.errors import CheckpointError, ConfigError
from tests.embedded.conftest import DIS, KL_LOSS, made_up_batch, trainer_args
from tests.fixtures.metrics_page import unexplained


@pytest.fixture
def make(policy_folder: Path) -> Any:
    def build(**flags: Any) -> PpoTrainer:
        return PpoTrainer(trainer_args(hf_checkpoint=str(policy_folder), **flags))

    return build


def weights(trainer: PpoTrainer, role: str = "actor") -> dict[str, torch.Tensor]:
    state = getattr(trainer, role).state_dict()
    return {
        name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def lambda_returns(rewards: list[float], whitened_over: list[torch.Tensor] | None) -> list[float]:
    """Each turn's advantage if V = 0 and token discounts are 1. Episodes end with turns 3 and 7 of
    eight."""
    advantages, ahead = [0.0] * 8, 0.0
    for i in reversed(range(8)):
        ahead = rewards[i] + (0.0 if i in (3, 7) else 0.99 * 0.95 * ahead)
        advantages[i] = ahead
    if whitened_over is None:
        return advantages
    every_token = [a for a, turn in zip(advantages, whitened_over, strict=True) for _ in turn]
    std, mean = torch.std_mean(torch.tensor(every_token))
    return [(a - mean.item()) / std.item() for a in advantages]


CONSTANT = {"lr_decay_style": "constant"}


@pytest.mark.parametrize(
    "flags",
    [
        {"num_rollout": 1, "rollout_batch_size": 8},
        {"normalize_advantages": False},
        {**KL_LOSS, **CONSTANT},
    ],
    ids=str,
)
def test_an_actor_update_is_the_one_that_a_plain_loop_makes_and_the_docs_explain_its_numbers(
    make: Any, policy_folder: Path, flags: dict[str, Any]
) -> None:
    """Oracle: Hugging Face model, torch's AdamW, one sample and one token at a time; V = 0 as at
    the start."""
    batch = made_up_batch()
    args = trainer_args(**flags)
    trainer = make(**flags)
    assert not unexplained(trainer.train(0, batch))

    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    plain = [p for p in model.parameters() if p.dim() <= 1]
    inner = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": plain}],
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=0.0,
    )

    def log_probs_of(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, n = batch["tokens"][i], batch["response_lengths"][i]
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)[
            len(tokens) - n - 1 : -1
        ]
        return table[range(n), tokens[-n:]], -(table.exp() * table).sum(-1)

    with torch.no_grad():
        old = [log_probs_of(i)[0] for i in range(8)]
    advantages = lambda_returns(
        batch["rewards"], whitened_over=old if args.normalize_advantages else None
    )
    for step in ([0, 1, 2, 3], [4, 5, 6, 7]):
        inner.zero_grad()
        for i in step:
            new, entropy = log_probs_of(i)
            for j in range(len(new)):
                ratio, a = (new[j] - old[i][j]).exp(), advantages[i]
                loss = max(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
                if a < 0:
                    loss = min(loss, torch.tensor(-3.0 * a))
                loss = loss - 0.001 * entropy[j]
                if args.use_kl_loss:  # the reference is the policy of the start
                    loss = loss + 0.5 * ((old[i][j] - new[j]).exp() - 1 - (old[i][j] - new[j]))
                (loss / len(new) / 4).backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        if args.lr_decay_style == "linear":
            for group in inner.param_groups:
                group["lr"] = args.lr * (1 - 4 / (args.num_rollout * args.rollout_batch_size))
    found, wanted = trainer.policy_state(), model.state_dict()
    worst = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
    moved = max(
        (found[name] - before).abs().max().item() for name, before in make().policy_state().items()
    )
    assert moved > 2e-4 and worst < 0.02 * moved


def test_dis_of_one_step_on_its_own_turns_is_plain_policy_gradient(make: Any) -> None:
    """With weights that have not moved, every ratio is 1: nothing is masked, and PPO makes the same
    first step."""
    batch = made_up_batch(turns=4)
    probe = make()
    data = to_rollout_data(batch, probe.device)
    own = probe._log_probs(data, micro_batches(data, range(len(data["tokens"])), 8192))["log_probs"]
    batch["rollout_log_probs"] = [row.tolist() for row in own]
    ppo, dis = (
        make(use_rollout_logprobs=True),
        make(**DIS),
    )
    ppo.train(0, batch)
    metrics = dis.train(0, batch)
    assert not unexplained(metrics)
    assert metrics["actor/pg_clipfrac"] == 0.0 and metrics["actor/dis_ess"] == pytest.approx(
        1.0, abs=1e-4
    )
    worst = max(
        (a - b).abs().max().item()
        for a, b in zip(weights(ppo).values(), weights(dis).values(), strict=True)
    )
    assert worst < 1e-5


def test_neither_masked_tokens_nor_a_bootstrap_samples_own_token_change_anything(make: Any) -> None:
    """A turn whose last token is masked learns nothing from that token, whatever it is."""

    def batch(step: int, token: int) -> dict[str, Any]:
        data = made_up_batch(seed=step, dummy=token)
        i = next(i for i, n in enumerate(data["response_lengths"]) if n > 3)
        data["loss_masks"][i] = [1] * (data["response_lengths"][i] - 1) + [0]
        data["tokens"][i][-1] = token
        return data

    one, other = make(), make()
    for step in range(2):
        one.train(step, batch(step, 5))
        other.train(step, batch(step, 200))
    for role in ("actor", "critic"):
        assert same(weights(one, role), weights(other, role))


def test_a_resumed_run_equals_an_unbroken_one(make: Any, tmp_path: Path) -> None:
    make = partial(make, lr_decay_style="cosine", num_rollout=4, rollout_batch_size=8)
    unbroken = make()
    for step in range(4):
        if step == 2:
            unbroken.save(str(tmp_path), 1)
        unbroken.train(step, made_up_batch(seed=step))
    resumed = make()
    assert resumed.load(str(tmp_path)) == 1
    for step in (2, 3):
        resumed.train(step, made_up_batch(seed=step))
    for role in ("actor", "critic"):
        assert same(weights(unbroken, role), weights(resumed, role))


def test_kl_to_the_start_enters_the_actors_advantages_and_not_the_value_targets(make: Any) -> None:
    batches = [made_up_batch(seed=step) for step in range(2)]
    without, with_kl = make(kl_coef=0.0), make(kl_coef=5.0)
    for trainer in (without, with_kl):
        first = trainer.train(0, batches[0])
    assert first["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    # At the start KL is zero everywhere, so both are equal; afterwards only the actor sees the
    # coefficient.
    pairs = zip(weights(without).values(), weights(with_kl).values(), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-4
    plain, pulled = (trainer.train(1, batches[1]) for trainer in (without, with_kl))
    assert pulled["actor/ref_kl"] != 0.0
    assert plain["critic/return_mean"] == pytest.approx(pulled["critic/return_mean"], abs=1e-5)
    assert plain["actor/pg_loss"] != pytest.approx(pulled["actor/pg_loss"], abs=1e-4)


def test_advantages_are_whitened_with_slimes_formula(make: Any) -> None:
    """slime divides by sqrt(variance + 1e-8), with the unbiased variance of all trained tokens."""
    raw, white = {}, {}
    for normalize, found in ((False, raw), (True, white)):
        found |= to_rollout_data(made_up_batch(), torch.device("cpu"))
        # Tiny advantages, so that the 1e-8 counts.
        found["rewards"] = [reward * 1e-4 for reward in found["rewards"]]
        found["values"] = [torch.zeros(n) for n in found["response_lengths"]]
        add_advantages(trainer_args(normalize_advantages=normalize), found)
    mask = torch.cat(raw["loss_masks"]).bool()
    advantages = torch.cat(raw["advantages"]).double()
    mean, variance = advantages[mask].mean(), advantages[mask].var()
    expected = (advantages - mean) / (variance + 1e-8).sqrt()
    assert torch.allclose(torch.cat(white["advantages"]).double(), expected, atol=1e-5)


def test_a_batch_that_fills_no_whole_steps_or_lacks_a_key_of_the_converter_is_refused(
    make: Any,
) -> None:
    trainer = make(global_batch_size=3)
    before = weights(trainer, "critic")
    with pytest.raises(ConfigError, match="--global-batch-size 3"):
        trainer.train(0, made_up_batch())
    batch = made_up_batch()
    del batch["loss_masks"]
    with pytest.raises(ConfigError, match="lacks loss_masks"):
        trainer.train(0, batch)
    assert same(before, weights(trainer, "critic"))


def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    trainer = make()
    trainer.save(str(tmp_path), 0)
    (tmp_path / ".trainer_1.123").mkdir()  # of a process that was killed while it saved
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match="No space left on device"),
    ):
        patch.setattr("embedded.trainer.checkpoint.save_file", full)
        trainer.save(str(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "trainer_0"]
    assert make().load(str(tmp_path)) == 0


def test_a_missing_a_damaged_and_a_foreign_checkpoint_are_refused_whole(
    make: Any, tmp_path: Path
) -> None:
    trainer = make()
    before = weights(trainer)
    with pytest.raises(CheckpointError, match="no usable trainer checkpoint"):
        trainer.load(str(tmp_path))
    other = make()
    other.train(0, made_up_batch())
    other.save(str(tmp_path), 0)
    path = tmp_path / "trainer_0" / "critic.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match="no usable trainer checkpoint"):
        trainer.load(str(tmp_path))
    path.write_bytes((tmp_path / "trainer_0" / "actor.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="output_layer"):
        trainer.load(str(tmp_path))
    path.write_bytes(whole)
    state = tmp_path / "trainer_0" / "state.json"
    facts = json.loads(state.read_text())
    state.write_text(json.dumps({**facts, "samples": {}}))
    with pytest.raises(CheckpointError, match="no usable trainer checkpoint"):
        trainer.load(str(tmp_path))
    state.write_text(json.dumps({**facts, "format": "other"}))
    with pytest.raises(CheckpointError, match="format 'other'"):
        trainer.load(str(tmp_path))
    assert same(before, weights(trainer))
    assert not list(tmp_path.glob(".*"))
