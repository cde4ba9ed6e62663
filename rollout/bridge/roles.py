"""The flags of actor and critic after `--megatron-config-path`, and the layout of their GPUs."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from advantage.flags import overrides_of
from rollout.errors import ConfigError

OWN_FOLDER = "--megatron-config-path FILE with megatron: [{name: default, role: critic, overrides: {save: FOLDER}}]"


def role_args(args: Any, role: str) -> Namespace:
    """The flags of one role; with a configuration file, slime drops the critic's
    `--custom-advantage-function-path`."""
    given = Namespace(**{**vars(args), **overrides_of(args, role)})
    if role == "critic" and getattr(args, "megatron_config_path", None):
        given.custom_advantage_function_path = None
    return given


def roles_of(args: Any) -> Sequence[str]:
    """The roles that slime trains: a critic only with `--advantage-estimator ppo`."""
    return (
        ("actor", "critic") if getattr(args, "advantage_estimator", None) == "ppo" else ("actor",)
    )


def samples_multiple(args: Any) -> int:
    """Return a number of which every optimizer step should hold a multiple of samples.

    slime's `build_dp_schedule` rounds the number of micro-batches up to a multiple of the
    data-parallel size, times the group of micro-batches with an interleaved pipeline, and fails
    where a step has fewer samples than that. If the step's samples are such a multiple themselves,
    the rounded number is never larger, however samples are packed.

    Without slime's flags for GPUs, it is `global_batch_size`, which every data-parallel size
    divides.
    """
    if not hasattr(args, "actor_num_gpus_per_node"):
        return getattr(args, "global_batch_size", 1)
    return math.lcm(*(_alignment(role_args(args, role)) for role in roles_of(args)))


def _alignment(args: Any) -> int:
    """Return what slime aligns the number of one role's micro-batches to."""
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    tensor, context = (
        getattr(args, f"{name}_parallel_size", 1) for name in ("tensor_model", "context")
    )
    gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    ranks = max(gpus // (tensor * stages * context), 1)
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) == 1:
        return ranks
    return ranks * (getattr(args, "microbatch_group_size_per_vp_stage", None) or stages)


def check_roles(args: Any) -> None:
    """Raise ConfigError if a critic's weights would not be kept apart, or its layout differs; names
    what to change."""
    if getattr(args, "advantage_estimator", None) != "ppo" or not hasattr(
        args, "megatron_config_path"
    ):
        return
    actor = role_args(args, "actor")
    critic = role_args(args, "critic")
    save = getattr(actor, "save", None)
    critic_save = getattr(critic, "save", None)
    if save and critic_save and os.path.realpath(save) == os.path.realpath(critic_save):
        raise ConfigError(
            f"--save {save} is the folder of both actor and critic, so the critic's checkpoint "
            "would overwrite the actor's at every save; give the critic its own folder: "
            f"{OWN_FOLDER}"
        )
    if save and critic_save and getattr(args, "save_retain_interval", None):
        raise ConfigError(
            f"--save-retain-interval {args.save_retain_interval} deletes the previous checkpoint "
            "as soon as the next is written, so a run that dies between the actor's and the "
            "critic's save cannot be resumed; leave it out and set checkpoints_kept in the YAML"
        )
    if (
        getattr(actor, "use_rollout_logprobs", False)
        and getattr(actor, "kl_coef", 0)
        and not args.megatron_config_path
    ):
        raise ConfigError(
            f"--use-rollout-logprobs with --kl-coef {actor.kl_coef} stops slime's critic in its "
            "first step, because it has no reference to compare with; slime sets its kl_coef to 0 "
            f"only with {OWN_FOLDER}"
        )
    _check_vocabulary(actor, critic)
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        if getattr(actor, name, 1) != getattr(critic, name, 1):
            raise ConfigError(
                f"{args.megatron_config_path} sets {name} for one role; slime needs it to be the "
                "same for both"
            )
    tied = not getattr(args, "untie_embeddings_and_output_weights", True)
    if (
        tied
        and not args.megatron_config_path
        and getattr(args, "pipeline_model_parallel_size", 1) > 1
    ):
        raise ConfigError(
            "this model ties its output layer to its embeddings. A critic has no such output "
            "layer, and slime unties it only for a role that has a configuration: pipeline "
            f"parallelism needs {OWN_FOLDER}"
        )


def _check_vocabulary(actor: Namespace, critic: Namespace) -> None:
    critics, actors = (_vocabulary(args) for args in (critic, actor))
    if critics is not None and actors is not None and critics != actors:
        raise ConfigError(
            f"the critic's hf_checkpoint {critic.hf_checkpoint} has another vocabulary than the "
            f"policy's {actor.hf_checkpoint}, but it reads the policy's token ids; take both from "
            "one family"
        )


def _vocabulary(args: Any) -> Mapping[str, Any] | None:
    """The tokens of a role's checkpoint and their ids; None without a tokenizer.json."""
    path = Path(getattr(args, "hf_checkpoint", None) or "") / "tokenizer.json"
    return (
        json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")
        if path.is_file()
        else None
    )


def critic_warning(args: Any) -> str | None:
    """Return a sentence if the actor would learn at once from a critic whose value head begins at
    random."""
    if "critic" not in roles_of(args) or getattr(args, "num_critic_only_steps", 0):
        return None
    if getattr(role_args(args, "critic"), "load", None) != getattr(args, "ref_load", None):
        return None  # it resumes, or it was pretrained
    return (
        "no warm-up: the critic's value head begins at random, and the actor learns from its "
        "first values; add critic_warmup to the YAML, or train the critic alone first, with "
        "--num-critic-only-steps 20 (our scripts: CRITIC_ONLY=20)"
    )
