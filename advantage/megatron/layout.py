"""Who computes with whom: the data-, context- and pipeline-parallel place of this process, read from Megatron.

Megatron is never imported here: if nothing else in the process imported it, it cannot have built process groups.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MEGATRON_STATE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Group:
    """This process's place in one kind of parallelism; `handle` is None where there is only one rank."""

    rank: int = 0
    size: int = 1
    handle: Any = None

    def device_like(self, x: torch.Tensor | None) -> torch.device:
        """Where tensors must lie to cross this group; `x` is what the rank has to send, if it has anything."""
        if self.handle is None or str(dist.get_backend(self.handle)) == "gloo":
            return torch.device("cpu")
        if x is not None and x.numel():
            return x.device
        return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Layout:
    """Where this process stands."""

    data: Group = Group()
    """Ranks with other samples; context parallelism not counted."""
    context: Group = Group()
    """Ranks with other slices of the same samples."""
    data_context: Group = Group()
    """Both, for statistics over all tokens."""
    stage: Group = Group()
    """All ranks of this pipeline stage: data, context and tensor parallelism."""
    last_stage: bool = True
    """Whether this pipeline stage has values and log-probs."""


def current_layout() -> Layout:
    """The layout that Megatron's process groups describe; one lone rank where torch.distributed does not run.

    Raises:
        RuntimeError: several processes run without Megatron's groups, so nobody can say who holds which samples.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Layout()
    mpu = sys.modules.get(MEGATRON_STATE)
    if mpu is None or not mpu.model_parallel_is_initialized():
        if dist.get_world_size() == 1:
            return Layout()
        raise RuntimeError(
            f"torch.distributed runs with {dist.get_world_size()} processes but Megatron's process groups are not "
            "initialised; call megatron.core.parallel_state.initialize_model_parallel first"
        )
    group = lambda handle: Group(dist.get_rank(handle), dist.get_world_size(handle), handle)
    return Layout(
        data=group(mpu.get_data_parallel_group(with_context_parallel=False)),
        context=group(mpu.get_context_parallel_group()),
        data_context=group(mpu.get_data_parallel_group(with_context_parallel=True)),
        stage=group(mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        last_stage=mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1,
    )
