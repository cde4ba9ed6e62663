"""PPO on Megatron-core: critic first, then the actor with the values from before the critic's update, as slime does.

Fed only by the converter's train data; advantages come from the hook that `custom_advantage_function_path` names.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from advantage.value_weight import first_token_weights, weigh_reducer
from embedded.trainer.batches import MicroBatch, RolloutData, micro_batches, optimizer_steps, to_rollout_data
from embedded.trainer.checkpoint import load_trainer, save_trainer
from embedded.trainer.losses import approx_kl, log_probs_and_entropy, policy_loss, value_loss
from embedded.trainer.megatron import build_model, build_optimizer, initialize, predict
from embedded.trainer.weights import megatron_shapes, megatron_to_hf
from envs.loading import load_attribute
from rollout.errors import ConfigError

Reducer = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[RolloutData, MicroBatch, torch.Tensor, Reducer], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class PpoTrainer:
    """Actor, critic and frozen reference in one process."""

    def __init__(self, args: Any) -> None:
        """Build all three from `args.hf_checkpoint`; the reference from `args.ref_load` if that is set.

        Raises:
            ConfigError: the checkpoint is unknown or not of a supported shape, or the flags contradict each other.
        """
        from transformers import AutoConfig

        if args.kl_coef and args.use_kl_loss:
            raise ConfigError(
                f"kl_coef {args.kl_coef} charges KL in the reward and use_kl_loss in the loss: set one of them to 0"
            )
        self.args = args
        self.device = initialize()
        self.shapes = megatron_shapes(AutoConfig.from_pretrained(args.hf_checkpoint))
        self.actor = build_model(args.hf_checkpoint, self.device)
        self.critic = build_model(args.critic_load or args.hf_checkpoint, self.device, critic=True)
        self.reference = build_model(args.ref_load or args.hf_checkpoint, self.device)
        samples = max(1, args.num_rollout) * args.rollout_batch_size * args.n_samples_per_prompt
        self.actor_optimizer = build_optimizer(self.actor, args, args.lr, samples)
        self.critic_optimizer = build_optimizer(self.critic, args, args.critic_lr, samples)
        # Actor and critic share nothing while they learn, so on a CPU each takes a core.
        side_by_side = self.device.type == "cpu" and (os.cpu_count() or 1) > 1
        self._pool = ThreadPoolExecutor(2 if side_by_side else 1, thread_name_prefix="train")

    def train(self, rollout_id: int, train_data: dict[str, Any]) -> dict[str, float]:
        """One PPO update from one batch; the actor stays as it is for the first `num_critic_only_steps` batches.

        Returns metrics; raises ConfigError where the data does not fill whole optimizer steps.
        """
        data = to_rollout_data(train_data, self.device)
        everything = micro_batches(data, range(len(data["tokens"])), self.args.max_tokens_per_gpu)
        actor_trains = rollout_id >= (self.args.num_critic_only_steps or 0)
        has_critic = self.args.advantage_estimator == "ppo"
        values = self._pool.submit(self._values, data, everything) if has_critic else None
        log_probs = self._pool.submit(self._log_probs, data, everything) if actor_trains else None
        critic_data = {**data, "values": values.result()} if values else data
        actor_data = {**critic_data, **log_probs.result()} if log_probs else None
        critic = None
        if has_critic:
            add_advantages(self.args, critic_data)
            critic = self._pool.submit(self._train_critic, critic_data)
        metrics = self._train_actor(rollout_id, actor_data) if actor_data is not None else {}
        return {**metrics, **(critic.result() if critic else {}), "train/actor_trains": float(actor_trains)}

    def policy_state(self) -> dict[str, torch.Tensor]:
        """The actor's weights under Hugging Face names; they share memory with the actor."""
        return megatron_to_hf(self.actor.state_dict(), self.shapes)

    def save(self, folder: str, rollout_id: int) -> None:
        """Write models and optimizers; raises CheckpointError where that fails."""
        save_trainer(folder, rollout_id, self._models, self._optimizers)

    def load(self, folder: str) -> int:
        """Restore the newest checkpoint; returns its rollout id. Raises CheckpointError if there is none to use."""
        return load_trainer(folder, self._models, self._optimizers)

    @property
    def _models(self) -> dict[str, Any]:
        return {"actor": self.actor, "critic": self.critic}

    @property
    def _optimizers(self) -> dict[str, Any]:
        return {"actor": self.actor_optimizer, "critic": self.critic_optimizer}

    @torch.no_grad()
    def _values(self, data: RolloutData, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """V(prefix before the token) for every response token, per sample."""
        return _per_sample(
            data, batches, lambda b: predict(self.critic, b.ids, b.row, b.column).squeeze(-1)
        )

    @torch.no_grad()
    def _log_probs(self, data: RolloutData, batches: Sequence[MicroBatch]) -> RolloutData:
        """Log-probs under the actor (or those of the rollout, if asked for) and under the reference."""
        found: RolloutData = {}
        models = {} if self.args.use_rollout_logprobs else {"log_probs": self.actor}
        if self.args.kl_coef or self.args.use_kl_loss:
            models["ref_log_probs"] = self.reference
        for key, model in models.items():
            found[key] = _per_sample(
                data,
                batches,
                lambda b, model=model: log_probs_and_entropy(
                    predict(model, b.ids, b.row, b.column), b.targets, self.args.rollout_temperature
                )[0],
            )
        return found

    def _train_critic(self, data: RolloutData) -> dict[str, float]:
        explained = _explained_variance(data)
        metrics = self._optimize(self.critic, self.critic_optimizer, data, self._value_loss)
        return {f"critic/{key}": value for key, value in {**metrics, **explained}.items()}

    def _train_actor(self, rollout_id: int, data: RolloutData) -> dict[str, float]:
        if self.args.use_rollout_logprobs:
            data["log_probs"] = data["rollout_log_probs"]
        add_advantages(self.args, data)
        if self.args.rollout_data_postprocess_path:
            hook = load_attribute(self.args.rollout_data_postprocess_path, "rollout_data_postprocess_path")
            hook(self.args, rollout_id, data)
        kl = _masked_mean(data, data["kl"])
        metrics = self._optimize(self.actor, self.actor_optimizer, data, self._policy_loss)
        return {f"actor/{key}": value for key, value in {**metrics, "ref_kl": kl}.items()}

    def _policy_loss(
        self, data: RolloutData, batch: MicroBatch, logits: torch.Tensor, reduce: Reducer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, entropy = log_probs_and_entropy(logits, batch.targets, self.args.rollout_temperature)
        old = batch.gather(data["log_probs"])
        loss, clipped = policy_loss(log_probs, old, batch.gather(data["advantages"]), self.args)
        policy, bonus = reduce(loss), reduce(entropy)
        total = policy - self.args.entropy_coef * bonus
        metrics = {
            "pg_loss": policy,
            "entropy": bonus,
            "pg_clipfrac": reduce(clipped),
            "ppo_kl": reduce(old - log_probs),
        }
        if self.args.use_kl_loss:
            kl = reduce(approx_kl(log_probs, batch.gather(data["ref_log_probs"]), self.args.kl_loss_type))
            total, metrics["kl_loss"] = total + self.args.kl_loss_coef * kl, kl
        return total, metrics

    def _value_loss(
        self, data: RolloutData, batch: MicroBatch, outputs: torch.Tensor, reduce: Reducer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old, returns = batch.gather(data["values"]), batch.gather(data["returns"])
        loss, clipped = value_loss(outputs.squeeze(-1), old, returns, self.args.value_clip)
        masks = [data["loss_masks"][i] for i in batch.samples]
        weights = torch.cat(first_token_weights(masks, getattr(self.args, "value_first_token_weight", 1.0)))
        weighted = weigh_reducer(reduce, weights)(loss)
        return weighted, {"value_loss": weighted, "value_clipfrac": reduce(clipped)}

    def _optimize(self, model: Any, optimizer: Any, data: RolloutData, loss_of: Loss) -> dict[str, float]:
        """One epoch: a step for each `global_batch_size` training groups. Returns means over the steps."""
        steps = optimizer_steps(data["rollout_ids"], self.args.global_batch_size)
        totals: dict[str, float] = defaultdict(float)
        for step in steps:
            trained = [i for i in step if int(data["loss_masks"][i].sum())]
            optimizer.zero_grad()
            for batch in micro_batches(data, trained, self.args.max_tokens_per_gpu):
                outputs = predict(model, batch.ids, batch.row, batch.column)
                loss, reported = loss_of(data, batch, outputs, sum_of_sample_mean(data, batch))
                (loss / self.args.global_batch_size).backward()
                for key, value in reported.items():
                    totals[key] += value.item() / self.args.global_batch_size
            _, norm, _ = optimizer.step()
            optimizer.schedule.step(self.args.global_batch_size)
            totals["grad_norm"] += norm
        return {key: value / len(steps) for key, value in totals.items()}


def add_advantages(args: Any, data: RolloutData) -> None:
    """Fill `kl`, then let the configured hook write `advantages` and `returns`; whiten if asked for.

    A critic's data has no log-probs, so its value targets are free of KL, as in slime.
    """
    if "ref_log_probs" in data:
        pairs = zip(data["log_probs"], data["ref_log_probs"], strict=True)
        data["kl"] = [approx_kl(p, q, args.kl_loss_type) for p, q in pairs]
    else:
        data["kl"] = [torch.zeros_like(mask, dtype=torch.float32) for mask in data["loss_masks"]]
    load_attribute(args.custom_advantage_function_path, "custom_advantage_function_path")(args, data)
    if args.normalize_advantages:
        lengths = [len(a) for a in data["advantages"]]
        flat, mask = torch.cat(data["advantages"]), torch.cat(data["loss_masks"]).bool()
        std, mean = torch.std_mean(flat[mask])
        data["advantages"] = list(torch.split((flat - mean) / (std + 1e-8), lengths))


def sum_of_sample_mean(data: RolloutData, batch: MicroBatch) -> Reducer:
    """slime's reducer: masked sums over the training group's number of trainable tokens, added over samples."""
    device = batch.targets.device
    sums = torch.tensor([max(data["rollout_mask_sums"][i], 1) for i in batch.samples], device=device)
    weights = batch.gather(data["loss_masks"]) / sums.repeat_interleave(torch.tensor(batch.lengths, device=device))
    return lambda x: (x * weights).sum()


def _per_sample(
    data: RolloutData, batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], torch.Tensor]
) -> list[torch.Tensor]:
    """Run `compute` over micro-batches and deal its flat results back to the samples."""
    found: dict[int, torch.Tensor] = {}
    for batch in batches:
        found.update(zip(batch.samples, torch.split(compute(batch), batch.lengths), strict=True))
    return [found[i] for i in range(len(data["tokens"]))]


def _masked_mean(data: RolloutData, per_sample: Sequence[torch.Tensor]) -> float:
    mask = torch.cat(data["loss_masks"]).bool()
    return torch.cat(list(per_sample))[mask].mean().item()


def _explained_variance(data: RolloutData) -> dict[str, float]:
    """How much of the returns' variance the critic knew before this update; means of both beside it."""
    mask = torch.cat(data["loss_masks"]).bool()
    values, returns = torch.cat(data["values"])[mask], torch.cat(data["returns"])[mask]
    variance = returns.var().clamp_min(1e-8)
    return {
        "explained_variance": (1 - (returns - values).var() / variance).item(),
        "value_mean": values.mean().item(),
        "return_mean": returns.mean().item(),
    }
