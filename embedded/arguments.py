"""slime's flags for a run on this machine, as a checked model, and the `args` namespace that
slime's hooks expect."""

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from advantage.flags import GROUP, advantage_flags, check_dis, check_estimator, check_kl
from advantage.settings import AdvantageSettings
from rollout.bridge.settings import CORE_FLAGS, RolloutSettings, check_keys
from slime_verlog import ConfigError, Field, Settings, read_settings, read_yaml_mapping


class OptimizerFlags(Settings):
    """AdamW and its learning-rate schedule, under slime's flag names."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate changes over the run: not at all, or down to 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices; biases and norms are not decayed."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's step."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest norm of all gradients together; larger gradients are scaled down to it."""


class EmbeddedFlags(OptimizerFlags):
    """Every flag of slime that the embedded run reads; batch sizes and learning rates suit a
    million weights."""

    hf_checkpoint: str
    """Hugging Face folder: tokenizer, initial policy and, unless set otherwise, critic and
    reference."""
    ref_load: str | None = None
    """Folder of the frozen reference policy; default: `hf_checkpoint`."""
    critic_load: str | None = None
    """What the critic starts from: a Hugging Face folder, or the `save` folder of another run, such
    as one of value pretraining, whose value head is then loaded too. Default: `hf_checkpoint`."""
    save: str | None = None
    """Folder for checkpoints; default: no checkpoints."""
    load: str | None = None
    """Folder whose latest checkpoint is resumed."""
    save_interval: int | None = Field(default=None, ge=1)
    """Updates between two checkpoints; with it, updates before an evaluation are saved too, and the
    last always is."""

    rollout_function_path: str = "rollout.fixed_turn.generate_rollout"
    """Import path of the function that plays a batch."""
    eval_function_path: str | None = None
    """Import path of the function that evaluates; default: `rollout_function_path`."""
    data_source_path: str = "rollout.data_source.EpisodeSource"
    """Import path of the class that supplies tasks and seeds."""
    custom_convert_samples_to_train_data_path: str = "rollout.samples.convert_samples_to_train_data"
    """Import path of the function that turns samples into train data."""
    custom_advantage_function_path: str = "advantage.hook.compute_advantages"
    """Import path of the function that computes advantages and returns."""
    rollout_data_postprocess_path: str | None = None
    """Import path of a hook that is called on the actor's data once its advantages are known."""
    custom_config_path: str | None = None
    """The YAML file."""

    num_rollout: int = Field(default=60, ge=1)
    """Updates, critic warm-up included."""
    start_rollout_id: int = Field(default=0, ge=0)
    """First update; a resumed run sets it."""
    rollout_batch_size: int = Field(default=256, ge=1)
    """Prompts per batch. A fixed-turn batch has rollout_batch_size x n_samples_per_prompt turns."""
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Samples per prompt; whole episodes per start in `embedded.whole_episodes`."""
    global_batch_size: int = Field(default=64, ge=1)
    """Training groups per optimizer step: turns, or whole episodes."""
    rollout_max_response_len: int = Field(default=40, ge=1)
    """Most tokens in one response."""
    rollout_max_context_len: int | None = Field(default=512, ge=1)
    """Most tokens in prompt and response together; the engine's context length."""
    rollout_temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; training uses the same."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    rollout_top_k: int = Field(default=-1, ge=-1)
    """Sample from the k likeliest tokens; -1: from all."""
    rollout_seed: int = 42
    """Seed of training episodes and of sampling."""
    eval_interval: int | None = Field(default=None, ge=1)
    """Updates between two evaluations; the first and the last policy are always evaluated."""

    advantage_estimator: str = "ppo"
    """`ppo` trains a critic; any other estimator trains the actor alone."""
    num_critic_only_steps: int = Field(default=6, ge=0)
    """Updates at the start in which the critic learns and the actor does not."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the actor."""
    critic_lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the critic."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of KL(policy | reference) in the token rewards."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL, in the rewards or the loss. k1 is refused in a loss: its gradient
    ignores the reference."""
    use_kl_loss: bool = False
    """Add the KL to the loss. Needs `kl_coef` 0, a `kl_loss_coef` and another `kl_loss_type` than
    k1."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL in the loss."""
    eps_clip: float = Field(default=0.2, gt=0)
    """PPO's clip range: the probability ratio stays above 1 - eps_clip."""
    eps_clip_high: float | None = Field(default=None, gt=0)
    """The ratio stays below 1 + eps_clip_high; default: `eps_clip`."""
    eps_clip_c: float | None = Field(default=3.0, gt=1)
    """Dual clip: bound on the loss of negative advantages, in multiples of the advantage; None: no
    bound."""
    value_clip: float = Field(default=0.5, gt=0)
    """How far one update may move a value before its loss is clipped."""
    entropy_coef: float = Field(default=0.001, ge=0)
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Whiten the advantages over all trained tokens of a batch."""
    use_rollout_logprobs: bool = False
    """Take the old log-probs from the engine instead of recomputing them."""
    use_dynamic_batch_size: bool = True
    """Micro-batches are filled by tokens; the only mode of the embedded trainer."""
    bf16: bool = False
    """Multiply in bfloat16, in the engine, in training and in imitation; weights, sums and
    optimizer stay float32. Several times faster for models of a hundred million weights on CPUs
    with AMX; slower on CPUs without."""
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Most tokens in one micro-batch, padding included. What several turns of it begin with is
    computed once."""

    sglang_router_ip: str = "127.0.0.1"
    """Address of the engine; set when it starts."""
    sglang_router_port: int | None = None
    """Port of the engine; set when it starts."""
    sglang_server_concurrency: int = Field(default=32, ge=1)
    """Requests that the engine runs at once."""
    sglang_enable_deterministic_inference: bool = True
    """Each turn has its own sampling seed."""

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        turns = self.rollout_function_path == "embedded.whole_episodes.generate_turns"
        if turns and self.lr_decay_style != "constant":
            planned = f"lr_decay_style {self.lr_decay_style} is planned in episodes, but {self.rollout_function_path}"
            raise ConfigError(
                f"{planned} takes steps in turns, so lr would be 0 early; set lr_decay_style to "
                "constant"
            )
        episodes = self.rollout_batch_size * self.n_samples_per_prompt
        whole = self.rollout_function_path == "embedded.whole_episodes.generate_rollout"
        if whole and episodes % self.global_batch_size:
            raise ConfigError(
                f"{episodes} episodes per batch (rollout_batch_size {self.rollout_batch_size} x "
                f"n_samples_per_prompt {self.n_samples_per_prompt}) do not fill optimizer steps of "
                f"global_batch_size {self.global_batch_size}; choose a divisor of {episodes}"
            )
        if self.kl_coef and self.use_kl_loss:
            raise ConfigError(
                f"kl_coef {self.kl_coef} and use_kl_loss charge the same KL twice; set one of them "
                "to 0"
            )
        check_kl(advantage_flags(self))
        return self


HOOKS = (
    "rollout_function_path",
    "eval_function_path",
    "data_source_path",
    "custom_convert_samples_to_train_data_path",
    "custom_advantage_function_path",
    "rollout_data_postprocess_path",
)
"""Flags that are import paths."""
WITHOUT_CRITIC: Mapping[str, Any] = {
    "advantage_estimator": "grpo",
    "custom_advantage_function_path": GROUP,
    "rollout_function_path": "embedded.whole_episodes.generate_rollout",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "global_batch_size": 4,
    "num_critic_only_steps": 0,
    "kl_coef": 0.0,
    "normalize_advantages": False,
}
"""Flags that `group_estimator` in the YAML sets, unless they are given: four whole episodes from
each of four starts per update, and four episodes per optimizer step."""


DIS_FLAGS: Mapping[str, Any] = {
    "use_rollout_logprobs": True,
    "eps_clip": 0.3,
    "eps_clip_high": 5.0,
    "eps_clip_c": None,
}
"""Flags that `policy_loss: dis` in the YAML sets, also by a preset, unless they are given: those
of SAO's paper, as in `scripts/run_sao.sh`."""


def make_args(config_path: str | Path, **overrides: Any) -> Namespace:
    """Build slime's `args` from the YAML's keys and flags; raises ConfigError if one is
    rejected."""
    return build_args(read_keys(config_path), custom_config_path=str(config_path), **overrides)


def build_args(keys: Mapping[str, Any], **flags: Any) -> Namespace:
    """Build slime's `args` from keys, which are not checked, and flags; raises ConfigError for a
    wrong flag."""
    group_estimator = keys.get("group_estimator")
    is_dis = AdvantageSettings.with_preset(keys).get("policy_loss") == "dis"
    own = {**(WITHOUT_CRITIC if group_estimator else {}), **(DIS_FLAGS if is_dis else {})}
    given = read_settings(EmbeddedFlags, {**own, **flags})
    check_estimator(advantage_flags(given), group_estimator)
    if is_dis:
        check_dis(advantage_flags(given))
    machine = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "use_critic": given.advantage_estimator == "ppo",
    }
    return Namespace(**given.model_dump(), **machine, **keys)


def read_keys(config_path: str | Path) -> dict[str, Any]:
    """Read the YAML's keys as written; raises ConfigError unless the plugin accepts them."""
    keys = read_yaml_mapping(str(config_path), "YAML")
    check_run_keys(keys)
    return keys


def check_run_keys(keys: Mapping[str, Any]) -> RolloutSettings:
    """Check the YAML's keys as `check_keys`; the error about a flag of slime's says how a run here
    is given it."""
    for key in CORE_FLAGS & keys.keys():
        known = key in EmbeddedFlags.model_fields
        how = (
            f"give --set-flag {key}=VALUE, or in a study flags: {{{key}: VALUE}}"
            if known
            else "leave it out"
        )
        raise ConfigError(f"'{key}' is one of slime's own flags and no key of the YAML; {how}")
    return check_keys(keys)


def with_absolute_files(value: Any) -> Any:
    """Copy the YAML's keys; the files of environments and memories get absolute paths."""
    if isinstance(value, list | tuple):
        return [with_absolute_files(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    copied = {key: with_absolute_files(item) for key, item in value.items()}
    for key in ("rollout_interaction_env_path", "env", "kind", "gae_form"):
        named = str(copied.get(key))
        if re.search(r"\.py(:\w+)?$", named):
            copied[key] = os.path.abspath(named)
    return copied


def embedded_flags(args: Namespace) -> EmbeddedFlags:
    """Read the typed flags in slime's `args`; raises ConfigError if one is missing or wrong."""
    return read_settings(
        EmbeddedFlags, {k: v for k, v in vars(args).items() if k in EmbeddedFlags.model_fields}
    )


def cores() -> int:
    """Count the CPU cores that this process may use, which `taskset` and containers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
