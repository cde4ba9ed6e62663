"""Writes the policies of a run as Hugging Face folders: the last, and the best on held-out episodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_policy(source: str | Path, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write `weights` with the configuration and tokenizer of the Hugging Face folder `source`.

    An earlier policy in `folder` is replaced in one step, so that an interrupted run leaves no half-written one.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", ".*"))
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class PolicyFolders:
    """Keeps `policy_after/` and `policy_best/` of a run up to date, evaluation by evaluation.

    The best policy has the highest win rate; among equals, the highest mean return; among equals, it is the earliest.
    """

    def __init__(self, source: str | Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.best_update: int | None = None
        """Number of updates of the policy in `policy_best/`."""
        self._best_score = (0.0, 0.0)

    def is_best(self, updates: int, score: tuple[float, float]) -> bool:
        """Whether this policy is the best so far; it then counts as that."""
        if self.best_update is not None and score <= self._best_score:
            return False
        self.best_update, self._best_score = updates, score
        return True

    def evaluated(self, updates: int, score: tuple[float, float], weights: Mapping[str, torch.Tensor]) -> None:
        """Write a policy that was evaluated after `updates` updates; its score is (win rate, mean return)."""
        if updates:
            self._write("after", weights)
        if self.is_best(updates, score):
            self._write("best", weights)

    def _write(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        write_policy(self._source, weights, self._folder / f"policy_{name}")
