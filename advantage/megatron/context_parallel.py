"""Context parallelism as slime lays it out: each rank holds one early and one late slice of every sequence.

A sequence of n tokens is cut into 2 x cp chunks; rank r owns chunk r and chunk 2 cp - 1 - r, so that causal
attention costs every rank the same. A response-aligned entry (value, log-prob) belongs to the rank that owns the
position *before* its token. slime's own `cp_utils` cuts the same way; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.megatron.layout import Group, Layout

Span = tuple[int, int]


def owned_spans(total: int, response: int, group: Group, padded: int | None = None) -> tuple[Span, Span]:
    """The two half-open ranges of response offsets that this rank holds.

    Args:
        total: tokens of prompt and response.
        response: tokens of the response.
        group: the context-parallel group.
        padded: the length that the sequence is padded to where the batch is not packed (`max_seq_lens`).
    """
    if group.size == 1:
        return (0, response), (response, response)
    chunk = -(-(total if padded is None else padded) // (2 * group.size))
    first = total - response - 1
    spans = []
    for k in (group.rank, 2 * group.size - 1 - group.rank):
        start = min(max(k * chunk - first, 0), response)
        spans.append((start, max(start, min((k + 1) * chunk - first, response))))
    return spans[0], spans[1]


def response_spans(rollout_data: Mapping[str, Any], layout: Layout) -> list[tuple[Span, Span]]:
    """`owned_spans` of every sample of slime's `rollout_data`."""
    totals, responses = rollout_data["total_lengths"], rollout_data["response_lengths"]
    padded = rollout_data.get("max_seq_lens") or [None] * len(totals)
    return [owned_spans(t, r, layout.context, p) for t, r, p in zip(totals, responses, padded, strict=True)]


def slice_rows(rows: Sequence[Tensor], spans: Sequence[tuple[Span, Span]]) -> list[Tensor]:
    """This rank's slice of every full response row."""
    return [
        row[a:b] if c == d else torch.cat([row[a:b], row[c:d]])
        for row, ((a, b), (c, d)) in zip(rows, spans, strict=True)
    ]


def place_rows(
    rows: Sequence[Tensor], spans: Sequence[tuple[Span, Span]], lengths: Sequence[int], group: Group
) -> Tensor:
    """All response rows end to end, 0 where another context-parallel rank has the entry; see `add_up`.

    Args:
        rows: this rank's slice of each sample.
        spans: `owned_spans` of each sample.
        lengths: response tokens of each sample.
        group: the context-parallel group.

    Raises:
        ValueError: a slice does not have the length that the layout demands; names the sample.
    """
    for i, (row, ((a, b), (c, d))) in enumerate(zip(rows, spans, strict=True)):
        if row.numel() != b - a + d - c:
            raise ValueError(f"sample {i} has {row.numel()} entries on this rank, its layout says {b - a + d - c}")
    if not rows:
        return torch.zeros(0)
    local = torch.cat(list(rows))
    if group.size == 1:
        return local
    full = local.new_zeros(sum(lengths))
    full[_places(spans, lengths).to(full.device)] = local
    return full


def add_up(full: Tensor, group: Group) -> None:
    """Complete the placed rows of every context-parallel rank, in place; one all-reduce for the whole batch."""
    if group.size > 1 and full.numel():
        dist.all_reduce(full, group=group.handle)


def _places(spans: Sequence[tuple[Span, Span]], lengths: Sequence[int]) -> Tensor:
    """Where each local entry stands among all responses end to end."""
    parts, offset = [torch.zeros(0, dtype=torch.long)], 0
    for ((a, b), (c, d)), length in zip(spans, lengths, strict=True):
        parts += [torch.arange(offset + a, offset + b), torch.arange(offset + c, offset + d)]
        offset += length
    return torch.cat(parts)
