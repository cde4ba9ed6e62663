"""PPO on Megatron-core, in slime's order: actor and critic both use the values from before the
critic's update.

The only input is the converter's train data. Advantages come from the hook in
`custom_advantage_function_path`.
"""

import logging
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from advantage.critic import Progress
from advantage.exchange import current_layout
from advantage.hl_gauss import describe_head, hl_gauss_of
from advantage.patch.roles import report_frozen
from advantage.saved_critic import head_record, keys_taken_over, pretrained_record
from advantage.settings import ROLE, advantage_settings
from advantage.training.alarms import check_finite, critic_alarm, off_policy_alarm
from advantage.training.losses import first_token_weights, turn_weights, weigh_reducer, whiten
from advantage.training.policy_loss import dis_loss, dis_metrics, finish_dis
from advantage.turn_table import STALENESS
from advantage.values import take_metrics
from embedded.arguments import cores, embedded_flags
from embedded.trainer import megatron
from embedded.trainer.batches import (
    MicroBatch,
    RolloutData,
    micro_batches,
    optimizer_steps,
    to_rollout_data,
)
from embedded.trainer.checkpoint import (
    TOKENIZER,
    check_tokenizer,
    critic_record,
    is_checkpoint,
    load_critic,
    load_trainer,
    save_trainer,
    tokenizer_digest,
)
from embedded.trainer.losses import approx_kl, log_probs_and_entropy, policy_loss, value_loss
from envs.loading import load_attribute

logger = logging.getLogger(__name__)

Reducer = Callable[[Tensor], Tensor]
Loss = Callable[[RolloutData, MicroBatch, Tensor, Reducer], tuple[Tensor, dict[str, Tensor]]]


class PpoTrainer:
    """Actor, critic and frozen reference in one process."""

    def __init__(self, args: Namespace) -> None:
        """Build all three models; raises ConfigError for a flag or an unusable checkpoint."""
        from transformers.models.auto.configuration_auto import AutoConfig

        flags = embedded_flags(args)
        self.args = args
        self.flags = flags
        start = next(
            (path for path in (flags.load, flags.critic_load) if path and is_checkpoint(path)), None
        )
        if start is not None:
            vars(args).update(
                keys_taken_over(advantage_settings(args), critic_record(start), start)
            )
        self._settings = advantage_settings(args)
        self._bins = hl_gauss_of(self._settings)
        self._critic_record = head_record(self._settings) if self._has_critic else {}
        if self._bins is not None:
            logger.info(
                "the critic's head is %s; --value-clip is ignored", describe_head(self._bins)
            )
        self._role_args = {
            role: Namespace(**{**vars(args), ROLE: role}) for role in ("actor", "critic")
        }
        self._alarm = off_policy_alarm(self._settings)
        self.device = megatron.initialize()
        self.config = AutoConfig.from_pretrained(flags.hf_checkpoint)
        self.actor = megatron.build_model(flags.hf_checkpoint, self.device, bf16=flags.bf16)
        start_of_critic = flags.critic_load or flags.hf_checkpoint
        is_saved = is_checkpoint(start_of_critic)
        folder = flags.hf_checkpoint if is_saved else start_of_critic
        self.critic = megatron.build_model(
            folder, self.device, critic=True, bf16=flags.bf16, bins=self._bins
        )
        if is_saved:
            check_tokenizer(start_of_critic, flags.hf_checkpoint)
            load_critic(start_of_critic, self.critic)
        parameters = dict(self.critic.named_parameters())
        for name in report_frozen("critic", parameters, self._settings.critic_frozen):
            parameters[name].requires_grad_(False)
        self.reference = megatron.build_model(
            flags.ref_load or flags.hf_checkpoint, self.device, bf16=flags.bf16
        )
        samples = flags.num_rollout * flags.rollout_batch_size * flags.n_samples_per_prompt
        self.actor_optimizer = megatron.Adam(self.actor, flags, flags.lr, samples)
        self.critic_optimizer = megatron.Adam(self.critic, flags, flags.critic_lr, samples)
        self._models = {"actor": self.actor, "critic": self.critic}
        self._optimizers = {"actor": self.actor_optimizer, "critic": self.critic_optimizer}
        # Actor and critic share nothing while they learn, so on a CPU each gets its own core if
        # this process has two.
        in_parallel = self.device.type == "cpu" and cores() > 1
        self._pool = ThreadPoolExecutor(2 if in_parallel else 1, thread_name_prefix="train")
        self._rollout_id = 0
        self.trained: tuple[str, RolloutData] | None = None
        """The last batch with its advantages, and the role that it trained; the actor's unless only
        the critic was."""

    def train(self, rollout_id: int, train_data: dict[str, Any]) -> dict[str, float]:
        """Make one PPO update from one batch, and return its metrics.

        With a critic, the actor does not change during the first `num_critic_only_steps` batches.
        """
        self._rollout_id = rollout_id
        data = to_rollout_data(train_data, self.device)
        everything = micro_batches(data, range(len(data["tokens"])), self.flags.max_tokens_per_gpu)
        if self._settings.value_pretraining.batches:
            return self._pretrain_critic(rollout_id, data, everything)
        has_critic = self._has_critic
        actor_trains = not has_critic or rollout_id >= self.flags.num_critic_only_steps
        values = self._pool.submit(self._values, data, everything) if has_critic else None
        log_probs = self._pool.submit(self._log_probs, data, everything) if actor_trains else None
        critic_data = {**data, "values": values.result()} if values else data
        actor_data = {**critic_data, **log_probs.result()} if log_probs else None
        critic = None
        if has_critic:
            add_advantages(self._role_args["critic"], critic_data)
            critic = self._pool.submit(self._train_critic, critic_data)
            if actor_data is not None and self._settings.actor_values == "after":
                critic.result()
                actor_data["values"] = self._values(data, everything)
        metrics = self._train_actor(rollout_id, actor_data) if actor_data is not None else {}
        self.trained = ("critic", critic_data) if actor_data is None else ("actor", actor_data)
        return {
            **metrics,
            **(critic.result() if critic else {}),
            "train/actor_trains": float(actor_trains),
        }

    @property
    def _has_critic(self) -> bool:
        return self.flags.advantage_estimator == "ppo"

    def policy_state(self) -> dict[str, Tensor]:
        """Return the actor's weights under Hugging Face names; they share memory with the actor."""
        return megatron.megatron_to_hf(self.actor.state_dict(), self.config)

    def save(self, folder: str, rollout_id: int) -> None:
        """Write models and optimizers; raises CheckpointError if that fails."""
        record = self._critic_record
        if record:
            record = {**record, TOKENIZER: tokenizer_digest(self.flags.hf_checkpoint)}
        save_trainer(folder, rollout_id, self._models, self._optimizers, record)

    def load(self, folder: str) -> int:
        """Restore the latest checkpoint and return its rollout id.

        Raises CheckpointError if none is usable, and ConfigError if its critic has another head.
        """
        keys_taken_over(self._settings, critic_record(folder), folder)
        return load_trainer(folder, self._models, self._optimizers)

    @torch.no_grad()
    def _values(self, data: RolloutData, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Compute V(prefix before the token) for every response token, per sample."""

        def values_of(batch: MicroBatch) -> Tensor:
            outputs = megatron.predict(self.critic, batch.ids, batch.row, batch.column)
            return outputs.squeeze(-1) if self._bins is None else self._bins.expectation(outputs)

        return _per_sample(data, batches, values_of)

    @torch.no_grad()
    def _log_probs(self, data: RolloutData, batches: Sequence[MicroBatch]) -> RolloutData:
        """Log-probs under the actor, unless those of the rollout are used, and under the reference
        if KL is charged."""
        computed: RolloutData = {}
        if not self.flags.use_rollout_logprobs:
            computed["log_probs"] = self._log_probs_under(self.actor, data, batches)
        if self.flags.kl_coef or self.flags.use_kl_loss:
            computed["ref_log_probs"] = self._log_probs_under(self.reference, data, batches)
        return computed

    def _log_probs_under(
        self, model: megatron.GPTModel, data: RolloutData, batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        def log_probs_of(batch: MicroBatch) -> Tensor:
            logits = megatron.predict(model, batch.ids, batch.row, batch.column)
            return log_probs_and_entropy(logits, batch.targets, self.flags.rollout_temperature)[0]

        return _per_sample(data, batches, log_probs_of)

    def _train_critic(self, data: RolloutData) -> dict[str, float]:
        measured = take_metrics(data)
        for _ in range(self._settings.critic_updates - 1):
            self._optimize(self.critic, self.critic_optimizer, data, self._value_loss, last=False)
        metrics = self._optimize(self.critic, self.critic_optimizer, data, self._value_loss)
        return _named("critic", {**metrics, **measured})

    def _pretrain_critic(
        self, rollout_id: int, data: RolloutData, batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Train the critic on the last batch, which has all collected turns, until it has
        converged."""
        pretraining = self._settings.value_pretraining
        if rollout_id + 1 < pretraining.batches:
            return {"train/actor_trains": 0.0}
        progress = Progress()
        models = [self.critic]
        metrics: dict[str, float] = {}
        while True:
            critic_data = {**data, "values": self._values(data, batches)}
            add_advantages(self._role_args["critic"], critic_data)
            measured = take_metrics(critic_data)
            if not progress.explained:
                critic_alarm().watch(measured, rollout_id)
            if not progress.begin_pass(pretraining, critic_data, models, current_layout()):
                break
            with progress.held_out_hidden(critic_data):
                metrics = self._optimize(
                    self.critic, self.critic_optimizer, critic_data, self._value_loss, last=False
                )
        progress.finish(pretraining, models)
        explained = progress.explained
        best = progress.best
        self._critic_record = pretrained_record(
            self._settings, explained, best, data, current_layout()
        )
        metrics |= {"held_out_explained_variance": explained[best], "passes": float(best)}
        return {**_named("critic", metrics), "train/actor_trains": 0.0}

    def _train_actor(self, rollout_id: int, data: RolloutData) -> dict[str, float]:
        if self.flags.use_rollout_logprobs:
            data["log_probs"] = data["rollout_log_probs"]
        add_advantages(self._role_args["actor"], data)
        if path := self.flags.rollout_data_postprocess_path:
            load_attribute(path, "rollout_data_postprocess_path")(self.args, rollout_id, data)
        trained = torch.cat(data["loss_masks"]).bool()
        kl = torch.cat(data["kl"])[trained].mean().item()
        size = torch.cat(data["advantages"])[trained].abs().mean().item()
        metrics = finish_dis(
            self._optimize(self.actor, self.actor_optimizer, data, self._policy_loss)
        )
        metrics |= self._alarm.watch(metrics, rollout_id)
        # What the hooks added for slime's own log, under slime's names.
        logged = {k: v.item() for k, v in data.items() if isinstance(v, Tensor) and not v.ndim}
        return {
            **_named("rollout", logged),
            **_named("actor", {**metrics, "ref_kl": kl, "advantage_abs": size}),
        }

    def _policy_loss(
        self, data: RolloutData, batch: MicroBatch, logits: Tensor, reduce: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        flags = self.flags
        log_probs, entropy = log_probs_and_entropy(logits, batch.targets, flags.rollout_temperature)
        old = batch.gather(data["log_probs"])
        advantages = batch.gather(data["advantages"])
        ppo_kl = old - log_probs
        low = flags.eps_clip
        high = flags.eps_clip_high
        if high is None:
            high = low
        off_policy: dict[str, Tensor] = {}
        if self._settings.policy_loss == "dis":
            loss, clipped = dis_loss(ppo_kl, advantages, low, high)
            stale = batch.gather(data[STALENESS]) if STALENESS in data else None
            off_policy = dis_metrics(ppo_kl, advantages, low, high, reduce, stale)
        else:
            loss, clipped = policy_loss(log_probs, old, advantages, low, high, flags.eps_clip_c)
        policy = reduce(loss)
        bonus = reduce(entropy)
        total = policy - flags.entropy_coef * bonus
        metrics = {"pg_loss": policy, "entropy": bonus, "pg_clipfrac": reduce(clipped)}
        metrics |= {"ppo_kl": reduce(ppo_kl), **off_policy}
        if "rollout_log_probs" in data:
            known = log_probs.detach() if flags.use_rollout_logprobs else old
            gap = known - batch.gather(data["rollout_log_probs"])
            metrics["train_rollout_logprob_abs_diff"] = reduce(gap.abs())
        if flags.use_kl_loss:
            reference = batch.gather(data["ref_log_probs"])
            kl = reduce(approx_kl(log_probs, reference, flags.kl_loss_type))
            total = total + flags.kl_loss_coef * kl
            metrics["kl_loss"] = kl
        return total, metrics

    def _value_loss(
        self, data: RolloutData, batch: MicroBatch, outputs: Tensor, reduce: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old = batch.gather(data["values"])
        returns = batch.gather(data["returns"])
        metrics: dict[str, Tensor] = {}
        if self._bins is None:
            clip = math.inf if self._settings.value_pretraining.batches else self.flags.value_clip
            loss, clipped = value_loss(outputs.squeeze(-1), old, returns, clip)
            metrics["value_clipfrac"] = reduce(clipped)
        else:
            loss = self._bins.loss(outputs, returns)
        masks = [data["loss_masks"][i] for i in batch.samples]
        weights = torch.cat(first_token_weights(masks, self._settings.value_first_token_weight))
        weighted = weigh_reducer(reduce, weights)(loss)
        return weighted, {"value_loss": weighted, **metrics}

    def _optimize(
        self,
        model: megatron.GPTModel,
        optimizer: megatron.Adam,
        data: RolloutData,
        loss_of: Loss,
        last: bool = True,
    ) -> dict[str, float]:
        """Train one epoch, one step per `global_batch_size` training groups; returns means over the
        steps.

        Only the batch's last epoch advances the learning-rate schedule. Raises NonFiniteLossError
        before a step whose loss is infinite or NaN.
        """
        groups = self.flags.global_batch_size
        most = self.flags.max_tokens_per_gpu
        steps = optimizer_steps(data["rollout_ids"], groups)
        totals: dict[str, float] = defaultdict(float)
        for step in steps:
            trained = [i for i in step if data["loss_masks"][i].any()]
            optimizer.zero_grad()
            for batch in micro_batches(data, trained, most):
                reduce = sum_of_sample_mean(data, batch)
                with megatron.precision(model):
                    outputs = megatron.predict(model, batch.ids, batch.row, batch.column)
                    loss, reported = loss_of(data, batch, outputs, reduce)
                    (loss / groups).backward()
                for key, value in reported.items():
                    totals[key] += value.item() / groups
            check_finite(totals, self._rollout_id)
            totals["grad_norm"] += optimizer.clip()
            optimizer.step()
            if last:
                optimizer.schedule.step(groups)
        return {key: value / len(steps) for key, value in totals.items()}


def add_advantages(args: Namespace, data: RolloutData) -> None:
    """Fill in `kl`, let the configured hook write `advantages` and `returns`, and whiten the
    advantages if asked to.

    A critic's data has no log-probs, so its value targets are free of KL, as in slime.
    """
    flags = embedded_flags(args)
    if "ref_log_probs" in data:
        pairs = zip(data["log_probs"], data["ref_log_probs"], strict=True)
        data["kl"] = [approx_kl(p, q, flags.kl_loss_type) for p, q in pairs]
    else:
        data["kl"] = [torch.zeros_like(mask, dtype=torch.float32) for mask in data["loss_masks"]]
    load_attribute(flags.custom_advantage_function_path, "custom_advantage_function_path")(
        args, data
    )
    if flags.normalize_advantages:
        data["advantages"] = whiten(
            data["advantages"], data["loss_masks"], current_layout().data_context
        )


def sum_of_sample_mean(data: RolloutData, batch: MicroBatch) -> Reducer:
    """Return slime's reducer as the patch weighs it: the sum over samples of their turns' means.

    Turns in one training group, as those of a whole episode, have one mean.
    """
    rows = []
    for i in batch.samples:
        divisor = batch.targets.new_tensor(
            max(data["rollout_mask_sums"][i], 1), dtype=torch.get_default_dtype()
        )
        rows.append(turn_weights(data["loss_masks"][i], divisor) / divisor)
    weights = torch.cat(rows)
    return lambda x: (x * weights).sum()


def _named(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{role}/{key}": value for key, value in metrics.items()}


def _per_sample(
    data: RolloutData, batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor]
) -> list[Tensor]:
    outputs: dict[int, Tensor] = {}
    for batch in batches:
        parts = torch.split(compute(batch), list(batch.lengths))
        outputs.update(zip(batch.samples, parts, strict=True))
    return [outputs[i] for i in range(len(data["tokens"]))]
