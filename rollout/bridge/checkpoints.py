"""Checkpoints on disk, as Megatron and the rollout write them: whether those that a run starts from
fit, and which old ones go."""

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from advantage.flags import INSTALL
from rollout.bridge.roles import role_args
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that Megatron writes last; it names the newest step."""
DELETING = ".deleting-"
"""A checkpoint is renamed before it is deleted, because a half-deleted one would look complete."""
_STEPS = r"iter_(\d{7})"
_STATES = r"slime_verlog_(\d+)\.pt"


def check_start_weights(args: Any) -> None:
    """Raise ConfigError if a checkpoint that actor, critic or reference starts from is not there;
    names the folder."""
    ppo = getattr(args, "advantage_estimator", None) == "ppo"
    critic = role_args(args, "critic").load if ppo else None
    if critic and not is_megatron_checkpoint(critic):
        raise ConfigError(
            f"the critic starts from {critic}, which holds no Megatron checkpoint (no "
            f"{TRACKER} in it), and slime's critic cannot load Hugging "
            "Face weights; run scripts/prepare_model.sh"
        )
    reference = getattr(args, "ref_load", None)
    if critic and critic != reference:
        _check_pretrained_critic(critic, reference)
    if reference and not _has_weights(reference):
        raise ConfigError(
            f"--ref-load {reference} holds neither a Megatron nor a Hugging Face checkpoint; was "
            "its conversion interrupted? run scripts/prepare_model.sh again"
        )


def check_pushed_weights(args: Any) -> None:
    """Raise ConfigError if slime would start the engines with another model's weights than the
    actor's.

    Where training is not offloaded, slime keeps the weights that it loaded last, the reference's or
    the teacher's, and pushes them before the first batch. With `--keep-old-actor`, the last ones
    are the actor's. In `--colocate`, it pushes its copy of the actor. `advantage.patch.install`
    repairs this.
    """
    args = role_args(args, "actor")
    from_copy = (
        getattr(args, "colocate", False)
        and getattr(args, "update_weight_transport", None) != "disk"
    )
    if getattr(args, "offload_train", True) or from_copy or getattr(args, "keep_old_actor", False):
        return
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "megatron":
        held = "teacher"
        path = args.opd_teacher_load
    elif getattr(args, "kl_coef", 0) or getattr(args, "use_kl_loss", False):
        held = "reference"
        path = getattr(args, "ref_load", None)
    else:
        return
    start = getattr(args, "load", None)
    if start and path and os.path.realpath(start) != os.path.realpath(path) and _has_weights(start):
        raise ConfigError(
            f"slime would play the first batch with the {held}'s weights ({path}) instead of the "
            "actor's, because it loads them last and training is not offloaded: give "
            f"--custom-megatron-init-path {INSTALL}"
        )


def seeds_file(args: Any, use: Literal["load", "save"]) -> Path | None:
    """Path of the file beside the critic's checkpoint that names the seeds of its value
    pretraining."""
    critic = role_args(args, "critic")
    # On one machine, slime calls it `critic_load`.
    folder = getattr(critic, f"critic_{use}", None) or getattr(critic, use, None)
    return Path(folder) / "slime_verlog_seeds.json" if folder else None


def is_megatron_checkpoint(folder: str) -> bool:
    """Whether the folder holds a complete checkpoint; Megatron writes this file last."""
    return (Path(folder) / TRACKER).is_file()


def _has_weights(folder: str) -> bool:
    return is_megatron_checkpoint(folder) or (Path(folder) / "config.json").is_file()


def _check_pretrained_critic(critic: str, reference: str | None) -> None:
    """Check a critic that does not start from the reference: slime would only warn and use a new
    value head.

    The critic's process compares the head itself with the settings (`advantage/saved_critic.py`).
    """
    found = _shapes(critic)
    if found is None:
        return
    head = next(
        (shape for name, shape in found.items() if name.endswith("output_layer.weight")), None
    )
    words = next(
        (shape[0] for name, shape in found.items() if name.endswith("word_embeddings.weight")), None
    )
    if head is None or head[0] == words:
        raise ConfigError(
            f"the critic starts from {critic}, which has no value head (its output layer is "
            f"{head}), so slime would start with a new one; give what run_value_pretraining.sh "
            "saved, or start the critic from --ref-load"
        )
    wanted = _shapes(reference) or {} if reference else {}
    for name in sorted(found.keys() & wanted.keys()):
        here = found[name]
        there = wanted[name]
        if "word_embeddings" in name:
            # This tensor's rows are padded to a number that depends on tensor parallelism.
            here = here[1:]
            there = there[1:]
        if here != there and "output_layer." not in name:
            raise ConfigError(
                f"the critic starts from {critic}, which is of another model than --ref-load "
                f"{reference}: its {name} has shape {found[name]}, not {wanted[name]}"
            )


def _shapes(folder: str) -> dict[str, tuple[int, ...]] | None:
    newest = (Path(folder) / TRACKER).read_text().strip()
    step = Path(folder) / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    if not (step / ".metadata").is_file():
        return None
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    sizes = {name: getattr(entry, "size", None) for name, entry in entries.items()}
    return {
        name: tuple(size)
        for name, size in sizes.items()
        if size is not None and not name.startswith("optimizer.")
    }


def rotate_checkpoints(args: Any, rollout_id: int, keep: int, states: Path) -> None:
    """Delete checkpoints older than the `keep` newest steps that every role and the rollout have; a
    failure is logged.

    A run resumes from a step that actor, critic and rollout state all have. `rollout_id` is the
    step that was just saved, `states` the folder of the rollout's own checkpoints.
    """
    ppo = getattr(args, "advantage_estimator", None) == "ppo"
    critic_only = ppo and rollout_id < (getattr(args, "num_critic_only_steps", 0) or 0)
    roles = ["critic"] if critic_only else ["actor", "critic"] if ppo else ["actor"]
    folders = [Path(role_args(args, role).save) for role in roles]
    common = sorted(set(_numbered(states, _STATES)).intersection(*map(_complete_steps, folders)))
    if len(common) < keep:
        return
    for folder, pattern in (*((folder, _STEPS) for folder in folders), (states, _STATES)):
        try:
            for path in folder.glob(DELETING + "*"):
                # Left by a run that was killed, and maybe saved the step again.
                _delete(path)
            for step, path in _numbered(folder, pattern).items():
                if step < common[-keep]:
                    _delete(path.rename(path.with_name(DELETING + path.name)))
        except OSError as error:
            logger.warning(
                "an old checkpoint could not be deleted, the disk may fill up: %s", error
            )


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _complete_steps(folder: Path) -> set[int]:
    """Completely written steps: up to the one that Megatron names in a file, which asynchronous
    saving writes late."""
    try:
        newest = int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return set()
    return {step for step in _numbered(folder, _STEPS) if step <= newest}


def _numbered(folder: Path, pattern: str) -> Mapping[int, Path]:
    """Files and folders whose whole name matches `pattern`, by their number; links are left
    alone."""
    paths: Sequence[Path] = list(folder.iterdir()) if folder.is_dir() else []
    matches = [(re.fullmatch(pattern, path.name), path) for path in paths if not path.is_symlink()]
    return {int(match[1]): path for match, path in matches if match}
