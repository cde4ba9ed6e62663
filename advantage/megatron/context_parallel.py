"""slime's layout of context parallelism: each rank holds one early and one late slice of every sequence.

A sequence is cut into 2 x cp chunks. Rank r owns chunks r and 2 cp - 1 - r, so causal attention costs every rank the
same. A response-aligned entry (value, log-prob) belongs to the rank that owns the position *before* its token. A test
compares these slices with slime's own `cp_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from advantage.megatron.layout import Group, Layout

Span = tuple[int, int]


def owned_spans(total: int, response: int, group: Group, padded: int | None = None) -> tuple[Span, Span]:
    """The two half-open ranges of response offsets that this rank holds.

    Args:
        total: tokens of prompt and response.
        response: tokens of the response.
        group: the context-parallel group.
        padded: the padded length of the sequence, if the batch is padded and not packed (`max_seq_lens`).
    """
    if group.size == 1:
        return (0, response), (response, response)
    chunk = -(-(total if padded is None else padded) // (2 * group.size))
    first = total - response - 1

    def clipped(k: int) -> Span:
        start = min(max(k * chunk - first, 0), response)
        return start, max(start, min((k + 1) * chunk - first, response))

    return clipped(group.rank), clipped(2 * group.size - 1 - group.rank)


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
    """All response rows end to end. Entries of other context-parallel ranks are 0 until an all-reduce adds them.

    Args:
        rows: this rank's slice of each sample.
        spans: `owned_spans` of each sample.
        lengths: response tokens of each sample.
        group: the context-parallel group.

    Raises:
        ValueError: a slice does not have the length that the layout requires; names the sample.
    """
    for i, (row, ((a, b), (c, d))) in enumerate(zip(rows, spans, strict=True)):
        if row.numel() != b - a + d - c:
            raise ValueError(f"sample {i} has {row.numel()} entries on this rank, but its layout has {b - a + d - c}")
    if not rows:
        return torch.zeros(0)
    local = torch.cat(list(rows))
    if group.size == 1:
        return local
    full = local.new_zeros(sum(lengths))
    full[_positions(spans, lengths).to(full.device)] = local
    return full


def _positions(spans: Sequence[tuple[Span, Span]], lengths: Sequence[int]) -> Tensor:
    """Position of each local entry among all responses end to end."""
    parts, offset = [torch.zeros(0, dtype=torch.long)], 0
    for ((a, b), (c, d)), length in zip(spans, lengths, strict=True):
        parts += [torch.arange(offset + a, offset + b), torch.arange(offset + c, offset + d)]
        offset += length
    return torch.cat(parts)
