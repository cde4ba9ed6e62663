"""The `args` that slime's hooks expect, for a run on this machine: slime's flag names, sizes that a CPU can carry."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import yaml

from rollout.bridge.settings import YAML_KEYS, load_settings
from rollout.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    # The hooks, by import path.
    "rollout_function_path": "rollout.fixed_turn.generate_rollout",
    "eval_function_path": None,
    "data_source_path": "rollout.data_source.EpisodeSource",
    "custom_convert_samples_to_train_data_path": "rollout.samples.convert_samples_to_train_data",
    "custom_advantage_function_path": "advantage.hook.compute_advantages",
    "rollout_data_postprocess_path": None,
    "custom_config_path": None,
    # Model and checkpoints.
    "hf_checkpoint": None,
    "ref_load": None,
    "critic_load": None,
    "save": None,
    "load": None,
    "save_interval": None,
    # Rollout.
    "num_rollout": 60,
    "start_rollout_id": 0,
    "rollout_batch_size": 256,
    "n_samples_per_prompt": 1,
    "global_batch_size": 64,
    "rollout_max_response_len": 40,
    "rollout_max_prompt_len": None,
    "rollout_max_context_len": 512,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_seed": 42,
    "sglang_enable_deterministic_inference": True,
    "eval_interval": None,
    # PPO.
    "advantage_estimator": "ppo",
    "num_critic_only_steps": 6,
    "lr": 3e-4,
    "critic_lr": 1e-3,
    "lr_decay_style": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "kl_coef": 0.001,
    "kl_loss_type": "k1",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": 3.0,
    "value_clip": 0.5,
    "entropy_coef": 0.001,
    "normalize_advantages": True,
    "use_rollout_logprobs": False,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 8192,
    # Engine.
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": None,
    "sglang_server_concurrency": 32,
}
"""slime's names; values of the common runs, with batch sizes and learning rates for a policy of a million weights."""


def make_args(config_path: str | Path, **overrides: Any) -> Namespace:
    """slime's flags with `overrides`, and the YAML's top-level keys set on them as slime does.

    Raises:
        ConfigError: an override that is no known flag, or a YAML that the plugin refuses.
    """
    unknown = sorted(set(overrides) - set(DEFAULTS))
    if unknown:
        raise ConfigError(f"the embedded trainer has no flag {unknown[0]}; it knows {', '.join(sorted(DEFAULTS))}")
    args = Namespace(**{**DEFAULTS, **overrides, "custom_config_path": str(config_path)})
    load_settings(args)
    for key, value in yaml.safe_load(Path(config_path).read_text(encoding="utf-8")).items():
        assert key in YAML_KEYS
        setattr(args, key, value)
    return args
