"""Recursions along chains of turns or rows, by doubling: log2(length of the longest chain) rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def solve_chain(a: Tensor, b: Tensor, following: Tensor) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[following[i]]; a `following` of -1 ends a chain. All [n], no cycles."""
    n = a.numel()
    a, b = torch.cat([a, a.new_zeros(1)]), torch.cat([b, b.new_zeros(1)])
    jump = _with_sentinel(following)
    while bool((jump != n).any()):
        # index_select is several times faster on a CPU than indexing.
        a = torch.addcmul(a, b, a.index_select(0, jump))
        b, jump = b * b.index_select(0, jump), jump.index_select(0, jump)
    return a[:n]


def solve_runs(a: Tensor, b: Tensor, longest: int) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[i + 1] in place of `a`; of every `longest` adjacent b, at least one is 0. All [n]."""
    step = 1
    while step < min(longest, len(a)):
        a[:-step] += b[:-step] * a[step:]
        b = F.pad(b[:-step] * b[step:], (0, step))
        step *= 2
    return a


def _with_sentinel(following: Tensor) -> Tensor:
    """`following` with one extra entry that points at itself and ends every chain."""
    n = following.numel()
    return torch.cat([torch.where(following < 0, n, following), following.new_full((1,), n)])


def gather_next(x: Tensor, following: Tensor, otherwise: Tensor) -> Tensor:
    """x[following], or `otherwise` if nothing follows; all [T]."""
    return torch.where(following >= 0, x[following.clamp(min=0)], otherwise) if x.numel() else otherwise
