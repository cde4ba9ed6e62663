"""Lets slime's Qwen3.5-VL model train on samples with an odd number of tokens.

slime main and v0.3.1 pad samples to a multiple of twice the context-parallel size, but only if that
size is above 1. The model always requires it, so without context parallelism the first sample of
odd length ends the run.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from advantage.patch.versions import wrap

MODEL = "slime_plugins.models.qwen3_5_vl"


def install(args: Any) -> None:
    """Mend the model if `--spec` names it.

    It is slime's `--custom-megatron-init-path` for pictures without our advantages;
    `advantage.patch.install` calls it.
    """
    if (getattr(args, "spec", None) or [""])[0] == MODEL:
        wrap(importlib.import_module(MODEL), "get_packed_cp_local_indices", _indices)


def _indices(
    old: Callable[..., torch.Tensor],
    cu_seqlens: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
) -> torch.Tensor:
    if cp_size > 1:
        return old(cu_seqlens, cp_size, cp_rank, device)
    return torch.arange(int(cu_seqlens[-1]), device=device)  # one rank has all tokens
