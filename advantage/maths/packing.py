"""Packs the turn tokens of one rank's samples end to end, as `dual_discount_gae` needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.turn_table import TurnKind, TurnRow


@dataclass(frozen=True)
class PackedTurns:
    """The turns of one rank's samples, in sample order. Positions count the R response tokens laid end to end."""

    positions: Tensor
    """[N] position of each turn token."""
    lengths: Tensor
    """[T] tokens per turn; 0 for bootstrap states and empty turns."""
    rewards: Tensor
    """[T] float64."""
    trained: Tensor
    """[N] whether the loss mask includes the token."""
    states: Tensor
    """[T] position of the first token of each turn or bootstrap state; -1 for an empty turn."""


def pack_turns(rows: Sequence[TurnRow], masks: Sequence[Tensor], lengths: Sequence[int]) -> PackedTurns:
    """Pack the tokens of all turns, with one entry per turn and one per bootstrap sample.

    Masked tokens inside a turn (observations, template text) are skipped, so a turn's reward falls on its last trained
    token. A fully masked turn keeps all its tokens: values and rewards pass through it, but it gets no gradient.

    Raises:
        TurnTableError: the loss mask includes a token outside all turns, or a bootstrap sample has no token.
    """
    for i, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask.numel() != length:
            raise TurnTableError(f"sample {i}: its loss mask has {mask.numel()} entries for {length} response tokens")
    device = masks[0].device if masks else torch.device("cpu")
    mask = torch.cat([*masks, torch.zeros(0, device=device)]).bool()
    starts, sizes, rewards = _spans(rows, lengths)
    starts, sizes = starts.to(device), sizes.to(device)
    turn = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
    positions = torch.arange(len(turn), device=device) + (starts - (sizes.cumsum(0) - sizes))[turn]
    trained = mask[positions]
    counts = torch.zeros_like(sizes).index_add_(0, turn, trained.long())
    kept = trained | (counts == 0)[turn]
    _refuse_stray_tokens(mask, positions, lengths)
    kept_sizes = torch.where(counts == 0, sizes, counts)
    positions, trained = positions[kept], trained[kept]
    heads = (kept_sizes.cumsum(0) - kept_sizes).clamp(max=max(len(positions) - 1, 0))
    heads = positions[heads] if len(positions) else heads
    bootstrap = torch.tensor(
        [row.kind is TurnKind.BOOTSTRAP for row in rows for _ in row.turns or (None,)], dtype=torch.bool, device=device
    )
    states = torch.where(bootstrap, starts, torch.where(kept_sizes > 0, heads, -1))
    return PackedTurns(positions, kept_sizes, rewards.to(device), trained, states)


def _spans(rows: Sequence[TurnRow], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Start position, size and reward of each turn; a bootstrap state has size 0."""
    entries: list[tuple[int, int, float]] = []
    offset = 0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.kind is TurnKind.BOOTSTRAP:
            if not length:
                raise TurnTableError(f"sample {i}: a bootstrap sample needs one response token to hold its value")
            entries.append((offset, 0, 0.0))
        entries += [(offset + turn.start, turn.end - turn.start, turn.reward) for turn in row.turns]
        offset += length
    starts = torch.tensor([start for start, _, _ in entries], dtype=torch.long)
    sizes = torch.tensor([size for _, size, _ in entries], dtype=torch.long)
    return starts, sizes, torch.tensor([reward for _, _, reward in entries], dtype=torch.float64)


def _refuse_stray_tokens(mask: Tensor, positions: Tensor, lengths: Sequence[int]) -> None:
    """Refuse tokens that the loss mask includes although they belong to no turn."""
    stray = mask.clone()
    stray[positions] = False
    if bool(stray.any()):
        position = int(stray.nonzero()[0])
        sample = int(torch.tensor(lengths).cumsum(0).gt(position).nonzero()[0])
        token = position - sum(lengths[:sample])
        raise TurnTableError(
            f"sample {sample}: its loss mask includes token {token} of the response, which belongs to no turn"
        )
