"""slime's layout of context parallelism: each rank holds one early and one late slice of every sequence.

A sequence is cut into 2 x cp chunks. Rank r owns chunks r and 2 cp - 1 - r, so causal attention costs every rank the
same. A response-aligned entry (value, log-prob) belongs to the rank that owns the position *before* its token. A test
compares these slices with slime's own `cp_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from advantage.packing import span_positions
from advantage.ranks import Group, Layout


@dataclass(frozen=True)
class LocalTokens:
    """The response tokens that this rank holds, of the R response tokens of its samples laid end to end."""

    lengths: Sequence[int]
    """Response tokens of each sample."""
    held: Sequence[int]
    """How many of them this rank holds."""
    positions: Tensor | None
    """Positions of the held tokens among all R; None if this rank holds all of them."""

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """This rank's rows as one new vector [R]; the tokens of other ranks are 0, until an all-reduce adds them.

        Raises:
            ValueError: a row does not have the length that the layout requires; names the sample.
        """
        sizes = [row.numel() for row in rows]
        if sizes != list(self.held):
            i = next(i for i, (size, held) in enumerate(zip(sizes, self.held, strict=True)) if size != held)
            raise ValueError(f"sample {i} has {sizes[i]} entries on this rank, but its layout has {self.held[i]}")
        local = torch.cat(list(rows)) if rows else torch.zeros(0)
        if self.positions is None:
            return local
        return local.new_zeros(sum(self.lengths)).index_copy_(0, self.positions.to(local.device), local)

    def pick(self, flat: Tensor) -> Tensor:
        """This rank's entries of a vector [R]."""
        return flat if self.positions is None else flat[self.positions.to(flat.device)]

    def split(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of a vector [R], one row per sample; the rows share memory."""
        # The plain split also records every row as a view for autograd, which takes half as long again.
        return list(torch.unsafe_split_with_sizes(self.pick(flat), list(self.held)))


def local_tokens(rollout_data: Mapping[str, Any], layout: Layout) -> LocalTokens:
    """The response tokens of slime's `rollout_data` that this rank holds."""
    responses = rollout_data["response_lengths"]
    if layout.context.size == 1:
        return LocalTokens(responses, responses, None)
    lengths = torch.tensor(responses, dtype=torch.long)
    totals = torch.tensor(rollout_data["total_lengths"], dtype=torch.long)
    padded = torch.tensor(rollout_data.get("max_seq_lens") or rollout_data["total_lengths"], dtype=torch.long)
    spans = owned_spans(totals, lengths, layout.context, padded)
    offsets = lengths.cumsum(0) - lengths
    sizes = spans[..., 1] - spans[..., 0]
    positions = span_positions((spans[..., 0] + offsets[:, None]).reshape(-1), sizes.reshape(-1))
    held: list[int] = cast(Any, sizes.sum(1)).tolist()
    return LocalTokens(responses, held, positions)


def owned_spans(total: Tensor, response: Tensor, group: Group, padded: Tensor) -> Tensor:
    """The two half-open ranges [start, end) of response offsets that this rank holds of each sample, [S, 2, 2].

    Args:
        total: [S] tokens of prompt and response.
        response: [S] tokens of the response.
        group: the context-parallel group.
        padded: [S] tokens of the sequence in the batch; more than `total` if it is padded (`max_seq_lens`).
    """
    chunk = (padded + 2 * group.size - 1) // (2 * group.size)
    owned = torch.tensor([group.rank, 2 * group.size - 1 - group.rank])
    starts = owned * chunk[:, None] - (total - response - 1)[:, None]
    spans = torch.stack([starts, starts + chunk[:, None]], -1)
    return torch.minimum(spans.clamp(min=0), response[:, None, None])
