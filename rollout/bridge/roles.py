"""The flags of actor and critic after `--megatron-config-path`, and checks that their checkpoints are safe."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from slime_verlog import read_yaml

OWN_FOLDER = "--megatron-config-path FILE with megatron: [{name: default, role: critic, overrides: {save: FOLDER}}]"


def overrides_of(args: Any, role: str) -> Mapping[str, Any]:
    """The flags that the role's entry overrides; empty without a file or without an entry.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping with a list of entries under `megatron`.
    """
    path = getattr(args, "megatron_config_path", None)
    if not path:
        return {}
    content = read_yaml(path, "--megatron-config-path")
    try:
        entries = [dict[str, Any](entry) for entry in content["megatron"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"--megatron-config-path {path} must have a list of mappings under megatron") from error
    for entry in entries:
        if entry.get("role") == role:
            return entry.get("overrides") or entry.get("args") or {}
    return {}


def role_args(args: Any, role: str) -> Namespace:
    """The flags of one role; with a configuration file, slime drops the critic's `--custom-advantage-function-path`."""
    given = Namespace(**{**vars(args), **overrides_of(args, role)})
    if role == "critic" and getattr(args, "megatron_config_path", None):
        given.custom_advantage_function_path = None
    return given


def check_roles(args: Any) -> None:
    """Check that training with a critic keeps two sets of weights apart.

    Raises:
        ConfigError: names the flag to change.
    """
    if getattr(args, "advantage_estimator", None) != "ppo" or not hasattr(args, "megatron_config_path"):
        return
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    save, critic_save = getattr(actor, "save", None), getattr(critic, "save", None)
    if save and critic_save and os.path.realpath(save) == os.path.realpath(critic_save):
        raise ConfigError(
            f"--save {save} is the folder of both actor and critic, so the critic's checkpoint would overwrite the "
            f"actor's at every save; give the critic its own folder: {OWN_FOLDER}"
        )
    if save and critic_save and getattr(args, "save_retain_interval", None):
        raise ConfigError(
            f"--save-retain-interval {args.save_retain_interval} deletes the previous checkpoint as soon as the next "
            "is written, so a run that dies between the actor's and the critic's save cannot be resumed; leave it out "
            "and set checkpoints_kept in the YAML"
        )
    tied = not getattr(args, "untie_embeddings_and_output_weights", True)
    if tied and not args.megatron_config_path and getattr(args, "pipeline_model_parallel_size", 1) > 1:
        raise ConfigError(
            "this model ties its output layer to its embeddings. A critic has no such output layer, and slime unties "
            f"it only for a role that has a configuration: pipeline parallelism needs {OWN_FOLDER}"
        )


def check_start_weights(args: Any) -> None:
    """Check that the checkpoints that actor, critic and reference start from are there.

    Raises:
        ConfigError: names the folder, and what it lacks.
    """
    ppo = getattr(args, "advantage_estimator", None) == "ppo"
    critic = role_args(args, "critic").load if ppo else None
    if critic and not is_megatron_checkpoint(critic):
        raise ConfigError(
            f"the critic starts from {critic}, which holds no Megatron checkpoint (no latest_checkpointed_iteration.txt"
            " in it), and slime's critic cannot load Hugging Face weights; run scripts/prepare_model.sh"
        )
    reference = getattr(args, "ref_load", None)
    if critic and critic != reference:
        _check_pretrained_critic(critic, reference)
    if reference and not is_megatron_checkpoint(reference) and not (Path(reference) / "config.json").is_file():
        raise ConfigError(
            f"--ref-load {reference} holds neither a Megatron nor a Hugging Face checkpoint; was its conversion "
            "interrupted? run scripts/prepare_model.sh again"
        )


def is_megatron_checkpoint(folder: str | Path) -> bool:
    """Whether the folder holds a complete checkpoint; Megatron writes this file last."""
    return (Path(folder) / "latest_checkpointed_iteration.txt").is_file()


def _check_pretrained_critic(critic: str, reference: str | None) -> None:
    """Check a critic that does not start from the reference: slime would only warn and use a random value head."""
    found = _shapes(critic)
    if found is None:
        return
    head = found.get("output_layer.weight")
    if head is None or head[0] != 1:
        raise ConfigError(
            f"the critic starts from {critic}, which has no value head (its output layer is {head}), so slime would "
            "start with a random one; give what run_value_pretraining.sh saved, or start the critic from --ref-load"
        )
    wanted = _shapes(reference) or {} if reference else {}
    for name in sorted(found.keys() & wanted.keys()):
        here, there = found[name], wanted[name]
        if "word_embeddings" in name:  # its rows are padded to a number that depends on tensor parallelism
            here, there = here[1:], there[1:]
        if here != there and not name.startswith("output_layer"):
            raise ConfigError(
                f"the critic starts from {critic}, which is of another model than --ref-load {reference}: its {name} "
                f"has shape {found[name]}, not {wanted[name]}"
            )


def _shapes(folder: str) -> dict[str, tuple[int, ...]] | None:
    """The shapes of all model tensors in the folder's newest Megatron checkpoint; None if it does not list them."""
    newest = (Path(folder) / "latest_checkpointed_iteration.txt").read_text().strip()
    step = Path(folder) / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    if not (step / ".metadata").is_file():
        return None
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    sizes = {name: getattr(entry, "size", None) for name, entry in entries.items()}
    return {name: tuple(size) for name, size in sizes.items() if size is not None and not name.startswith("optimizer.")}
