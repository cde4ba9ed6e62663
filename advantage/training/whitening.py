"""Whitens advantages over the trained tokens of all data- and context-parallel ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from advantage.exchange import Group


@torch.no_grad()
def whiten(rows: Sequence[Tensor], masks: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Scale the rows to mean 0 and variance 1 over the group's trained tokens; float64 sums, one all-reduce.

    Call it on every rank, after the returns are computed. As in slime, untrained tokens are shifted and scaled too.
    `masks` are 1 on trained tokens and shaped like `rows`; `group` is `Layout.data_context`. Raises ValueError if the
    whole group has no trained token.
    """
    like = rows[0] if rows else torch.zeros(0)
    flat = torch.cat([*rows, like.new_zeros(0)]).double()
    kept = flat[torch.cat([*masks, like.new_zeros(0)]).bool()]
    sums = torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), (kept**2).sum()])
    sums = group.total(sums, like=flat)
    count, mean = sums[0], sums[1] / sums[0]
    if count == 0:
        raise ValueError("no token of this batch is trained, so advantages cannot be whitened; check the loss masks")
    variance = (sums[2] / count - mean**2) * (count / (count - 1).clamp(min=1))
    scale = torch.rsqrt(variance.clamp(min=0) + 1e-8)
    return [((row.double() - mean.to(row.device)) * scale.to(row.device)).to(row.dtype) for row in rows]
