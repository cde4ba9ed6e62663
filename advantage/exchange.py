"""Exchanges turns between data-parallel ranks, because the turns of one episode may be on any rank
in any order.

Every rank gets the rows of all turns and solves all chains. `link_turns` says which turn follows
which. A failure on one rank becomes a failure on every rank of the group, so none waits in a
collective forever. `current_layout` finds the groups.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.errors import OtherRankError, TurnTableError
from advantage.turn_table import TurnColumns

_collectives = cast(Any, dist)
"""torch.distributed, whose collectives are not fully typed."""

TERMINATED, TRUNCATED, BOOTSTRAP, NOTES, UNTRAINED = 1, 2, 4, 8, 16
"""Flags of a turn; NOTES: the environment did not move after it; UNTRAINED: none of its tokens is
trained."""
ENDED = TERMINATED | TRUNCATED


class Exchange:
    """One exchange, which all ranks of a group make in this context; if a rank fails first, the
    others raise."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._made = False

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self._made:
            _gather_counts(-1, self._group)

    def rows(self, own: Tensor) -> tuple[Tensor, slice]:
        """Gather the rows [T, k] of all ranks on the CPU, and this rank's slice; raises
        OtherRankError."""
        self._made = True
        table = own
        start = 0
        if self._group.size > 1:
            table, start = gather_turns(own, self._group)
        return table.cpu(), slice(start, start + len(own))


def turn_flags(columns: TurnColumns, trained: Tensor | None = None) -> Tensor:
    """Encode how each turn ends, whether the environment moved, and whether it is trained, as one
    number; [T] int64."""
    flags = NOTES * (~columns.moves).long()
    if trained is not None:
        flags += UNTRAINED * ~trained.cpu()
    flags += TERMINATED * columns.terminated
    flags += TRUNCATED * columns.truncated
    flags += BOOTSTRAP * columns.bootstrap
    return flags


@contextmanager
def relayed(group: Group) -> Generator[None]:
    """Run work that every rank of the group does, then one collective: what fails on one rank fails
    on all.

    The work must not contain a collective, unless a `relayed` of its own ends before it: a rank
    that fails reports to the collective at the end, while the others would wait in the one inside.
    Raises OtherRankError if another rank failed; this rank's own failure is raised unchanged.
    """
    try:
        yield
    except Exception:
        _gather_counts(-1, group)
        raise
    _gather_counts(0, group)


def link_turns(segment: Tensor, index: Tensor, flags: Tensor) -> Tensor:
    """Find what follows each turn in its segment, an index or -1; [T]. Raises TurnTableError for an
    invalid segment.

    Turns may be in any order; `flags` are those of `turn_flags`.
    """
    if not segment.numel():
        return segment.long()
    flags = flags & (ENDED | BOOTSTRAP)
    order = in_turn_order(segment, index)
    segment = segment[order]
    index = index[order]
    flags = flags[order]
    same = segment[1:] == segment[:-1]
    before = flags[:-1]
    after = flags[1:]
    turn_after = same & (after & BOOTSTRAP == 0)

    def refuse(wrong: Tensor, what: str) -> None:
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise TurnTableError(f"segment {int(segment[i])}, turn {int(index[i])}: {what}")

    refuse(same & (index[1:] == index[:-1]), "it is in the batch twice")
    refuse(
        same & (index[1:] != index[:-1] + 1),
        "the next turn is missing, but a later one is in the batch",
    )
    refuse(
        same & (before & BOOTSTRAP > 0),
        "a bootstrap sample is followed by another sample of its segment",
    )
    refuse(turn_after & (before & ENDED > 0), "it ended the episode, but another turn follows")
    last = torch.cat([~same, torch.ones(1, dtype=torch.bool)])
    refuse(
        last & (flags == 0),
        "it neither terminated nor truncated, but the batch has neither a next turn nor a "
        "bootstrap sample",
    )
    following = torch.full_like(order, -1)
    linked = (same & (before & TERMINATED == 0)).nonzero()[:, 0]
    following[order[linked]] = order[linked + 1]
    return following


def in_turn_order(segment: Tensor, index: Tensor) -> Tensor:
    """Sort turns by segment and, inside a segment, by index; returns the order, [T]."""
    order = torch.argsort(index, stable=True)
    return order[torch.argsort(segment[order], stable=True)]


def gather_turns(own: Tensor, group: Group) -> tuple[Tensor, int]:
    """Gather the rows [T, k] of all ranks, and the index of this rank's first row; raises as
    `Exchange.rows`."""
    counts = _gather_counts(len(own), group, own)
    widest = max(counts)
    padded = torch.zeros(widest, own.shape[1], dtype=torch.float64, device=group.device_like(own))
    padded[: len(own)] = own
    parts = group.all_gather(padded) if widest else [padded] * group.size
    table = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return table, sum(counts[: group.rank])


def _gather_counts(count: int, group: Group, like: Tensor | None = None) -> list[int]:
    """Gather one number per rank; -1 tells the ranks that wait here that this rank failed, and they
    raise."""
    if group.size == 1:
        return [count]
    mine = torch.tensor([count], dtype=torch.long, device=group.device_like(like))
    counts = [int(n) for n in torch.cat(group.all_gather(mine)).cpu()]
    if min(counts) < 0 <= count:
        raise OtherRankError(
            f"rank {counts.index(-1)} of {len(counts)} failed while computing advantages; its log "
            "has the cause"
        )
    return counts


@dataclass(frozen=True)
class Group:
    """The ranks that share one kind of parallelism with this process; `handle` is None if it has
    only one rank."""

    rank: int = 0
    size: int = 1
    handle: Any = None

    @classmethod
    def of(cls, handle: Any) -> Group:
        """Wrap a process group of torch.distributed."""
        return cls(dist.get_rank(handle), dist.get_world_size(handle), handle)

    def all_reduce(self, x: Tensor) -> None:
        """Add up `x` over the ranks, in place; nothing happens in a group of one or with an empty
        `x`."""
        if self.size > 1 and x.numel():
            _collectives.all_reduce(x, group=self.handle)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Gather `x` of every rank, in rank order; all have the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _collectives.all_gather(parts, x, group=self.handle)
        return parts

    def total(self, x: Tensor, like: Tensor) -> Tensor:
        """Sum `x` over the ranks, on the device that this group needs; `like` is one of the rank's
        tensors."""
        if self.size > 1:
            x = x.to(self.device_like(like))
            self.all_reduce(x)
        return x

    def device_like(self, x: Tensor | None) -> torch.device:
        """Choose the device from which this group sends tensors; `x` is what the rank has to send,
        if anything."""
        if self.handle is None or str(dist.get_backend(self.handle)) == "gloo":
            return torch.device("cpu")
        return (
            x.device
            if x is not None and x.is_cuda
            else torch.device("cuda", torch.cuda.current_device())
        )


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

    Raises RuntimeError if several processes run without Megatron's groups: which rank has which
    samples is unknown.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Layout()
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is None or not mpu.model_parallel_is_initialized():
        if dist.get_world_size() == 1:
            return Layout()
        raise RuntimeError(
            f"torch.distributed runs with {dist.get_world_size()} processes but Megatron's process "
            "groups are not initialised; call "
            "megatron.core.parallel_state.initialize_model_parallel first"
        )
    return Layout(
        data=Group.of(mpu.get_data_parallel_group(with_context_parallel=False)),
        context=Group.of(mpu.get_context_parallel_group()),
        data_context=Group.of(mpu.get_data_parallel_group(with_context_parallel=True)),
        stage=Group.of(mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        pipeline=Group.of(mpu.get_pipeline_model_parallel_group()),
        last_stage=mpu.get_pipeline_model_parallel_rank()
        == mpu.get_pipeline_model_parallel_world_size() - 1,
    )
