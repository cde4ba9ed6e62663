"""The custom YAML as one checked dataclass; whatever cannot work is refused here, before any GPU is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from envs.options import read_options
from rollout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What of the past a prompt shows in `history: window`; see `rollout/play/memory.py`."""

    kind: str = "window"
    n: int = 1
    period: int = 16

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ConfigError(f"memory.n counts past turns, so it must be >= 0, got {self.n}")
        if self.period < 1:
            raise ConfigError(f"memory.period must be at least 1, got {self.period}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How hard to try a `/generate` request before its turn counts as failed."""

    timeout_s: float = 600.0
    max_retries: int = 6
    backoff_s: float = 0.5
    backoff_max_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Critic warm-up: `w_epoch` batches are collected, then `w_iter` are drawn from them."""

    w_epoch: int = 0
    w_iter: int = 0
    fraction: float = 0.1
    tolerance: float = 0.25
    """Relative change of the critic's loss over the warm-up's second half above which a clear trend is warned about."""

    def __post_init__(self) -> None:
        if self.tolerance <= 0:
            raise ConfigError(f"critic_warmup.tolerance must be greater than 0, got {self.tolerance}")
        if self.w_epoch < 0 or self.w_iter < 0:
            raise ConfigError(f"critic_warmup.w_epoch and w_iter must be >= 0, got {self.w_epoch} and {self.w_iter}")
        if self.w_iter and not self.w_epoch:
            raise ConfigError(f"critic_warmup.w_iter is {self.w_iter} but w_epoch is 0: there is nothing to draw from")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"critic_warmup.fraction must be in (0, 1], got {self.fraction}")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out episodes: `episodes` seeds for each task, from `seed_start` on, never used in training."""

    episodes: int = 64
    seed_start: int = 1_000_000_000
    tasks: tuple[Any, ...] = ()
    max_turns: int | None = None
    """Turns after which a held-out episode counts as truncated; None: as in training."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"eval.episodes must be at least 1, got {self.episodes}")
        if self.max_turns is not None and self.max_turns < 1:
            raise ConfigError(f"eval.max_turns must be at least 1, got {self.max_turns}")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Every key of the custom YAML (`--custom-config-path`), with its default."""

    rollout_interaction_env_path: str
    """Environment module (`envs.babyai`) or `.py` file."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Options of the environment, checked by its module."""
    tasks: tuple[Any, ...] = ()
    """Task names, or mappings {task, weight, env, options, sweep}; see `envs/mixture.py`."""
    seed_start: int = 0
    """Seed of the first training episode; episode k plays seed_start + k."""
    eval: EvalConfig = field(default_factory=EvalConfig)

    history: Literal["window", "full"] = "window"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    max_turns: int | None = None
    """Turns after which an episode counts as truncated; None leaves it to the environment."""
    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"
    use_inference_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_image_pixels: int = 2_097_152
    """Larger pictures are scaled down to it. The default is a little more than 1920 x 1080, and makes at most 2,048
    tokens for Qwen3-VL, which has one per 32 x 32 pixels."""
    max_observation_chars: int = 65_536
    """Characters of one observation; a longer one is cut in the middle, with a note."""
    max_observation_images: int = 16
    """Pictures of one observation; more are left out, with a note."""

    n_env: int = 32
    """Slots, each with one live episode."""
    turn_quota: Literal["global", "per_env"] = "global"
    bootstrap_on_time_limit: bool = False
    critic_warmup: WarmupConfig = field(default_factory=WarmupConfig)
    """Not `warmup`: Megatron has an argument of that name and refuses it."""

    env_backend: Literal["inline", "process", "ray"] = "process"
    env_workers: int | None = None
    """Worker processes; None: one a CPU core, at most n_env."""
    env_step_timeout_s: float = 60.0
    env_reset_timeout_s: float = 300.0
    max_env_retries_per_turn: int = 2
    max_episode_failures_per_batch: int = 8
    max_turn_retries: int = 8
    """Times one turn is issued again after an abort or a failed engine call."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    gamma_step: float = 0.99
    lambda_step: float = 0.95
    gamma_token: float = 1.0
    lambda_token: float = 1.0
    gae_form: Literal["dual", "token", "turn", "bi_level"] = "dual"
    """Which GAE the advantage hook computes; see `advantage/maths/forms.py`."""
    group_estimator: Literal["grpo", "rloo", "gigpo"] = "grpo"
    """Which estimator `advantage.group.compute_advantages` computes, without a critic; see there."""
    gigpo_step_weight: float = 1.0
    gigpo_discount: Literal["step", "both"] = "step"
    """Which returns of GiGPO `gamma_step` discounts: those from a turn on (the paper's), or the episode's as well."""
    value_first_token_weight: float = 3.0
    action_hacking_patience: int = 3
    """Updates that the action-hacking watch averages into one point; more means less noise and a later warning."""
    checkpoints_kept: int | None = None
    """Steps that actor, critic and rollout state keep on disk, at each save; None keeps all of them."""

    def __post_init__(self) -> None:
        for name in ("gamma_step", "lambda_step", "gamma_token", "lambda_token"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        above_zero = (
            *("n_env", "env_step_timeout_s", "env_reset_timeout_s", "value_first_token_weight"),
            "action_hacking_patience",
        )
        for name in (*above_zero, "max_image_pixels", "max_observation_chars", "max_observation_images"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("max_turns", "checkpoints_kept"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.history == "full" and self.use_inference_chat_template:
            raise ConfigError(
                "use_inference_chat_template drops earlier reasoning, so tokens cannot be appended; "
                "use history: window with it, or leave it false"
            )


FIELDS = {f.name for f in dataclasses.fields(RolloutConfig)}


def load_config(args: Any) -> RolloutConfig:
    """Read the plugin's settings from slime's `args` and check them.

    slime sets the YAML's top-level keys on `args`; the file named by `args.custom_config_path` is read again
    to find keys that nothing would ever use.

    Raises:
        ConfigError: unknown or mistyped key, a core flag in the YAML, or an impossible combination.
    """
    given = _read_yaml(getattr(args, "custom_config_path", None))
    for key in given:
        if key in CORE_FLAGS:
            flag = "--" + key.replace("_", "-")
            raise ConfigError(
                f"'{key}' is one of the framework's own flags, read before the YAML; give {flag} instead"
            )
    known = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    return read_options(RolloutConfig, {**given, **known})


def _read_yaml(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--custom-config-path {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--custom-config-path {path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--custom-config-path {path} must hold a mapping, got {type(data).__name__}")
    return data


CORE_FLAGS = frozenset(
    """
    advantage_estimator custom_config_path data_source_path eps_clip gamma global_batch_size hf_checkpoint kl_coef
    lambd load lr n_samples_per_prompt num_critic_only_steps num_rollout rollout_batch_size rollout_function_path
    rollout_max_context_len rollout_max_response_len rollout_seed rollout_temperature rollout_top_k rollout_top_p save
    """.split()  # noqa: SIM905 - reads better as words
)
