"""slime's flags that the rollout reads, as a frozen record, and what becomes of all others
(`slime_flags.yaml`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError
from rollout.spec import CHARS_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFlags:
    """Fields have slime's names; the defaults apply if `args` lacks the flag."""

    hf_checkpoint: str = ""
    rollout_batch_size: int = 1
    n_samples_per_prompt: int = 1
    global_batch_size: int = 1
    rollout_seed: int = 42
    rollout_max_response_len: int = 0
    rollout_max_context_len: int | None = None
    rollout_max_prompt_len: int | None = None
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_stop: Any = None
    rollout_stop_token_ids: Any = None
    eval_temperature: float | None = None
    eval_top_p: float | None = None
    eval_top_k: int | None = None
    eval_max_response_len: int | None = None
    sglang_router_ip: str | None = None
    sglang_router_port: int | None = None
    sglang_enable_deterministic_inference: bool = False
    router_policy: str | None = None
    use_rollout_routing_replay: bool = False
    use_rollout_logprobs: bool = False
    over_sampling_batch_size: int | None = None
    rollout_num_engines: int | None = None
    rollout_num_gpus: int | None = None
    rollout_num_gpus_per_engine: int | None = None
    sglang_server_concurrency: int | None = None
    partial_rollout: bool = False
    mask_offpolicy_in_partial_rollout: bool = False
    rollout_function_path: str | None = None
    eval_function_path: str | None = None
    loss_type: str = "policy_loss"
    debug_rollout_only: bool = False
    debug_train_only: bool = False
    multimodal_keys: Any = None
    spec: Sequence[str] | None = None
    custom_model_provider_path: str | None = None
    use_fault_tolerance: bool = False
    rollout_health_check_first_wait: float = 0.0
    rollout_health_check_interval: float = 0.0
    rollout_health_check_timeout: float = 0.0
    save: str | None = None
    save_interval: int | None = None
    num_rollout: int | None = None
    load: str | None = None
    finetune: bool = False
    update_weights_interval: int = 1
    update_weight_mode: str | None = None
    release_train: bool = False
    num_critic_only_steps: int = 0
    use_critic: bool = True
    colocate: bool = False
    offload_rollout: bool | None = None

    @classmethod
    def read(cls, args: Any) -> RolloutFlags:
        """The flags as slime parsed them."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    @property
    def turns_per_batch(self) -> int:
        """Turns in one fixed-turn batch."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def is_fully_asynchronous(self) -> bool:
        """Whether slime's fully asynchronous loop runs, which takes every aborted sample back."""
        return "fully_async" in (self.rollout_function_path or "")

    @property
    def max_begun_samples(self) -> int:
        """The largest number of samples that slime's outer loop can have begun and not finished."""
        groups = self.rollout_batch_size + (
            self.over_sampling_batch_size or self.rollout_batch_size
        )
        return max(
            groups * self.n_samples_per_prompt, (self.sglang_server_concurrency or 0) * self.engines
        )

    @property
    def engines(self) -> int:
        """Number of engines, 1 if slime does not say."""
        found = self.rollout_num_engines or (self.rollout_num_gpus or 1) // (
            self.rollout_num_gpus_per_engine or 1
        )
        return max(found, 1)

    def saves_after(self, rollout_id: int) -> bool:
        """Whether slime writes a checkpoint after this rollout: every `--save-interval` rollouts
        and after the last."""
        if self.save is None or self.save_interval is None:
            return False
        return (rollout_id + 1) % self.save_interval == 0 or rollout_id + 1 == self.num_rollout

    def fits(self, prompt_tokens: int, most: int | None = None) -> bool:
        """Whether a prompt of this length leaves room in the context for a response of full length,
        or of `most`."""
        if self.rollout_max_prompt_len is not None and prompt_tokens > self.rollout_max_prompt_len:
            return False
        context = self.rollout_max_context_len
        return context is None or prompt_tokens + (most or self.rollout_max_response_len) <= context

    def left(self, prompt_tokens: int) -> int | None:
        """How many tokens of the context are left beside a prompt of this length; None without a
        limit."""
        context = self.rollout_max_context_len
        return None if context is None else context - prompt_tokens

    def check_first_prompt(
        self, task: str, tokens: int, config: RolloutSettings | None, most: int | None = None
    ) -> None:
        """Raise ConfigError if a task's first prompt does not fit into the context, or notes would
        always be due.

        `config` is None where the memory does not apply.
        """
        first = f"the first prompt of task {task!r} has {tokens} tokens"
        if not self.fits(tokens, most):
            given = f"{'eval' if most else 'rollout'}-max-response-len {most or self.rollout_max_response_len}"
            raise ConfigError(
                f"{first}; with --{given} it does not fit: raise "
                "--rollout-max-context-len (and --rollout-max-prompt-len)"
            )
        if config is None or config.memory.kind != "notes":
            return
        memory = config.memory
        left = self.left(tokens)
        if config.history == "window" and tokens > memory.budget:
            raise ConfigError(
                f"{first}, above memory.budget: {memory.budget}, so notes would be asked for after "
                "every turn; raise it"
            )
        if config.history == "full" and left is not None and left < memory.free:
            raise ConfigError(
                f"{first}, which leaves {left} of --rollout-max-context-len "
                f"{self.rollout_max_context_len}, fewer than memory.free: {memory.free}, so notes "
                "would be asked for at once; lower memory.free or raise the flag"
            )

    def sampling_params(self, *, evaluation: bool = False) -> dict[str, Any]:
        """SGLang's sampling parameters, as in slime's own rollout; `eval_*` flags take precedence
        in an evaluation."""

        def flag(name: str) -> Any:
            given = getattr(self, f"eval_{name}") if evaluation else None
            return getattr(self, f"rollout_{name}") if given is None else given

        params = {
            "temperature": flag("temperature"),
            "top_p": flag("top_p"),
            "top_k": flag("top_k"),
            "max_new_tokens": flag("max_response_len"),
            "stop": self.rollout_stop,
            "stop_token_ids": self.rollout_stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if not evaluation and params["top_p"] != 1.0:
            params["custom_params"] = {"return_top_p_token_ids": True}
        return params


def check_lengths(args: Any, flags: RolloutFlags, config: RolloutSettings) -> None:
    """Check how responses are sampled and whether they fit; raises ConfigError, which names the
    flag to change."""
    if getattr(args, "rollout_max_response_len", 0) is None:
        raise ConfigError(
            "--rollout-max-response-len is missing: give the most tokens that a response may have"
        )
    if flags.rollout_temperature <= 0:
        given = f"{flags.rollout_temperature:g}"
        raise ConfigError(
            f"--rollout-temperature {given} must be above 0, because training divides by it"
        )
    _check_context(args, flags)
    _check_notes(flags, config)


def _check_context(args: Any, flags: RolloutFlags) -> None:
    context = flags.rollout_max_context_len
    served = getattr(args, "sglang_context_length", None)
    if context is None:
        return
    if context <= flags.rollout_max_response_len:
        raise ConfigError(
            f"--rollout-max-context-len {context} leaves no room for a prompt beside "
            f"--rollout-max-response-len {flags.rollout_max_response_len}"
        )
    if served is not None and context > served:
        raise ConfigError(
            f"--rollout-max-context-len {context} is longer than the engine serves "
            f"(--sglang-context-length {served}); lower the first or raise the second"
        )
    path = Path(flags.hf_checkpoint or "") / "config.json"
    if served is not None or not path.is_file():
        return
    model = json.loads(path.read_text(encoding="utf-8"))
    longest = (model.get("text_config") or model).get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ConfigError(
            f"--rollout-max-context-len {context} is longer than the model's "
            f"max_position_embeddings {longest}, which is all that the engine serves; lower it, or "
            "extend the model's rope and give --sglang-context-length"
        )


def _check_notes(flags: RolloutFlags, config: RolloutSettings) -> None:
    """A response must have room for notes of full length and an action, a prompt for the notes and
    an observation."""
    memory = config.memory
    response = flags.rollout_max_response_len
    if (
        memory.kind == "notes"
        and config.history == "full"
        and flags.rollout_max_context_len is None
    ):
        raise ConfigError(
            "memory.kind: notes with history: full writes notes when the context is nearly full: "
            "give --rollout-max-context-len"
        )
    if memory.kind == "notes" and memory.max_tokens > response:
        raise ConfigError(
            f"memory.max_tokens: {memory.max_tokens} is longer than any response may be "
            f"(--rollout-max-response-len {response}): lower it or raise the flag"
        )
    if memory.kind != "inline_notes":
        return
    chars = memory.notes_chars
    tokens = -(-chars // CHARS_PER_TOKEN)
    advice = f"lower memory.notes_chars: {chars} (about {tokens} tokens)"
    if tokens >= response:
        raise ConfigError(
            f"a response of --rollout-max-response-len {response} tokens has no room for an action "
            f"after notes of full length: {advice} or raise the flag"
        )
    if not flags.fits(tokens + 1):
        raise ConfigError(
            f"a prompt has no room for an observation beside notes of full length: {advice} or "
            f"raise --rollout-max-context-len {flags.rollout_max_context_len}, of which a response "
            f"takes {response}, and --rollout-max-prompt-len {flags.rollout_max_prompt_len}"
        )


@cache
def _table() -> Mapping[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("slime_flags.yaml").read_text(encoding="utf-8"))


def sentences(decision: Literal["refused", "warned"], hooks: Collection[str]) -> dict[str, str]:
    """By flag, why it is refused or warned about beside these hooks."""
    rows = [row for row in _table()[decision] if row["hook"] in hooks]
    return {flag: f"{flag} {row['why']}" for row in rows for flag in row["flags"].split()}
