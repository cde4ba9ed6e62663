"""The ranks that work together with this process: Megatron's process groups."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

MEGATRON_STATE = "megatron.core.parallel_state"

_collectives = cast(Any, dist)
"""torch.distributed, whose collectives are not fully typed."""


@dataclass(frozen=True)
class Group:
    """The ranks that share one kind of parallelism with this process; `handle` is None if it has only one rank."""

    rank: int = 0
    size: int = 1
    handle: Any = None

    @classmethod
    def of(cls, handle: Any) -> Group:
        """Wrap a process group of torch.distributed."""
        return cls(dist.get_rank(handle), dist.get_world_size(handle), handle)

    def all_reduce(self, x: Tensor) -> None:
        """Add up `x` over the ranks, in place; nothing happens in a group of one or with an empty `x`."""
        if self.size > 1 and x.numel():
            _collectives.all_reduce(x, group=self.handle)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Gather `x` of every rank, in rank order; all have the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _collectives.all_gather(parts, x, group=self.handle)
        return parts

    def total(self, x: Tensor, like: Tensor) -> Tensor:
        """Sum `x` over the ranks, on the device that this group needs; `like` is one of the rank's tensors."""
        if self.size > 1:
            x = x.to(self.device_like(like))
            self.all_reduce(x)
        return x

    def device_like(self, x: Tensor | None) -> torch.device:
        """Choose the device from which this group sends tensors; `x` is what the rank has to send, if anything."""
        if self.handle is None or str(dist.get_backend(self.handle)) == "gloo":
            return torch.device("cpu")
        return x.device if x is not None and x.is_cuda else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Layout:
    """The groups of this process."""

    data: Group = Group()
    """Ranks with other samples, without context parallelism."""
    context: Group = Group()
    """Ranks with other slices of the same samples."""
    data_context: Group = Group()
    """Data and context parallelism together, for statistics over all tokens."""
    stage: Group = Group()
    """All ranks of this pipeline stage: data, context and tensor parallelism."""
    pipeline: Group = Group()
    """Ranks with other layers of the same model and the same samples."""
    last_stage: bool = True
    """Whether this pipeline stage has values and log-probs."""


def current_layout() -> Layout:
    """Read Megatron's process groups; a single rank if torch.distributed is not initialised.

    Raises RuntimeError if several processes run without Megatron's groups: which rank has which samples is unknown.
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
    return Layout(
        data=Group.of(mpu.get_data_parallel_group(with_context_parallel=False)),
        context=Group.of(mpu.get_context_parallel_group()),
        data_context=Group.of(mpu.get_data_parallel_group(with_context_parallel=True)),
        stage=Group.of(mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        pipeline=Group.of(mpu.get_pipeline_model_parallel_group()),
        last_stage=mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1,
    )
