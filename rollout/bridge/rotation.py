"""Deletes old checkpoints so that actor, critic and rollout state always keep the same last steps (`checkpoints_kept`).

A run resumes from a step that all of them have. Megatron rotates each role separately and keeps only the newest step,
so after a crash between the actor's and the critic's save no step would be left to resume from. Here, only steps that
are complete everywhere count, and everything newer than the oldest kept step stays.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.bridge.roles import role_args

logger = logging.getLogger(__name__)

DELETING = ".deleting-"
"""A checkpoint is renamed before it is deleted, because a half-deleted one would look complete."""


def rotate_checkpoints(args: Any, rollout_id: int, keep: int, states: Path) -> None:
    """Delete checkpoints older than the `keep` newest steps that every role has; a failure to delete is logged.

    `rollout_id` is the step that was just saved, `states` the folder of the rollout's own checkpoints. While only the
    critic trains, slime does not save the actor.
    """
    ppo = getattr(args, "advantage_estimator", None) == "ppo"
    critic_only = ppo and rollout_id < (getattr(args, "num_critic_only_steps", 0) or 0)
    roles = ["critic"] if critic_only else ["actor", "critic"] if ppo else ["actor"]
    folders = [Path(role_args(args, role).save) for role in roles]
    complete = [_complete_steps(folder) for folder in folders]
    common = sorted(step for step in _states(states) if all(step in steps for steps in complete))
    if len(common) < keep:
        return
    for folder in folders:
        _delete(folder, {step: path for step, path in _steps(folder).items() if step < common[-keep]})
    _delete(states, {step: path for step, path in _states(states).items() if step < common[-keep]})


def _complete_steps(folder: Path) -> set[int]:
    """Completely written steps: up to the one that Megatron names in a file, which asynchronous saving writes late."""
    try:
        newest = int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return set()
    return {step for step in _steps(folder) if step <= newest}


def _steps(folder: Path) -> Mapping[int, Path]:
    return _numbered(folder, r"iter_(\d{7})")


def _states(folder: Path) -> Mapping[int, Path]:
    return _numbered(folder, r"slime_verlog_(\d+)\.safetensors")


def _numbered(folder: Path, pattern: str) -> Mapping[int, Path]:
    """Files and folders whose whole name matches `pattern`, by their number; links are left alone."""
    paths: Sequence[Path] = list(folder.iterdir()) if folder.is_dir() else []
    matches = [(re.fullmatch(pattern, path.name), path) for path in paths if not path.is_symlink()]
    return {int(match[1]): path for match, path in matches if match}


def _delete(folder: Path, old: Mapping[int, Path]) -> None:
    try:
        for path in old.values():
            path.rename(path.with_name(DELETING + path.name))
        for path in folder.glob(DELETING + "*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        logger.warning("an old checkpoint could not be deleted, the disk may fill up: %s", error)
