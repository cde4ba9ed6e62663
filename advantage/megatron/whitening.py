"""Whitening of advantages over all trained tokens of all data- and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.megatron.layout import Group


@torch.no_grad()
def whiten(rows: Sequence[Tensor], masks: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The rows with mean 0 and variance 1 over all masked-in tokens of the group; float64 sums, one all-reduce.

    Must run after the returns are formed, because returns need advantages as they are. A rank without tokens takes
    part in the sums all the same. As in slime, tokens outside the mask are shifted and scaled alike.

    Args:
        rows: this rank's advantages, one row a sample.
        masks: 1 on trained tokens; the same shapes.
        group: data and context parallelism together (`Layout.data_context`).

    Raises:
        ValueError: no token of the whole group is trained.
    """
    like = rows[0] if rows else torch.zeros(0)
    flat = torch.cat([*rows, like.new_zeros(0)]).double()
    kept = flat[torch.cat([*masks, like.new_zeros(0)]).bool()]
    sums = torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), (kept**2).sum()])
    if group.size > 1:
        sums = sums.to(group.device_like(flat))
        dist.all_reduce(sums, group=group.handle)
    count, mean = sums[0], sums[1] / sums[0]
    if count == 0:
        raise ValueError("no token of this batch is trained, so advantages cannot be whitened; check the loss masks")
    variance = (sums[2] / count - mean**2) * (count / (count - 1).clamp(min=1))
    scale = torch.rsqrt(variance.clamp(min=0) + 1e-8)
    return [((row.double() - mean.to(row.device)) * scale.to(row.device)).to(row.dtype) for row in rows]
