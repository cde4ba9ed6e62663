"""From samples with masks and turn spans to the packed tokens that `dual_discount_gae` works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.turn_table import TurnKind, TurnRow


@dataclass(frozen=True)
class PackedTurns:
    """The turns of one rank's samples, in sample order, over the responses laid end to end (R tokens)."""

    places: Tensor
    """[N] where each turn token stands among the R."""
    lengths: Tensor
    """[T] tokens of each turn; 0 for bootstrap states and empty turns."""
    rewards: Tensor
    """[T] float64."""
    trained: Tensor
    """[N] whether the loss mask lets the token be trained on."""
    states: Tensor
    """[T] where the first token of each turn or bootstrap state stands among the R; -1 for an empty turn."""


def pack_turns(rows: Sequence[TurnRow], masks: Sequence[Tensor], lengths: Sequence[int]) -> PackedTurns:
    """Lay out the tokens of all turns; one entry a turn and one a bootstrap sample.

    Masked tokens inside a turn (observations, template text) are skipped, so a turn's reward meets its last trained
    token. A turn that is masked altogether keeps all its tokens: value and reward pass through it as they would
    unmasked, and only its gradient is gone.

    Raises:
        TurnTableError: a token is trained on that belongs to no turn, or a bootstrap sample has no token.
    """
    for i, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask.numel() != length:
            raise TurnTableError(f"sample {i}: its loss mask has {mask.numel()} entries for {length} response tokens")
    device = masks[0].device if masks else torch.device("cpu")
    mask = torch.cat([*masks, torch.zeros(0, device=device)]).bool()
    starts, sizes, rewards = _spans(rows, lengths)
    starts, sizes = starts.to(device), sizes.to(device)
    turn = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
    places = torch.arange(len(turn), device=device) + (starts - (sizes.cumsum(0) - sizes))[turn]
    trained = mask[places]
    counts = torch.zeros_like(sizes).index_add_(0, turn, trained.long())
    kept = trained | (counts == 0)[turn]
    _refuse_stray_tokens(mask, places, lengths)
    kept_sizes = torch.where(counts == 0, sizes, counts)
    places, trained = places[kept], trained[kept]
    heads = (kept_sizes.cumsum(0) - kept_sizes).clamp(max=max(len(places) - 1, 0))
    heads = places[heads] if len(places) else heads
    bootstrap = [row.kind is TurnKind.BOOTSTRAP for row in rows for _ in row.turns or (None,)]
    lent = torch.tensor(bootstrap, dtype=torch.bool, device=device)
    states = torch.where(lent, starts, torch.where(kept_sizes > 0, heads, -1))
    return PackedTurns(places, kept_sizes, rewards.to(device), trained, states)


def _spans(rows: Sequence[TurnRow], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Start among all R tokens, size and reward of each turn; a bootstrap state has size 0."""
    starts, sizes, rewards, offset = [], [], [], 0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.kind is TurnKind.BOOTSTRAP:
            if not length:
                raise TurnTableError(f"sample {i}: a bootstrap sample needs one response token to hold its value")
            starts.append(offset)
            sizes.append(0)
            rewards.append(0.0)
        for turn in row.turns:
            starts.append(offset + turn.start)
            sizes.append(turn.end - turn.start)
            rewards.append(turn.reward)
        offset += length
    long = lambda x: torch.tensor(x, dtype=torch.long)
    return long(starts), long(sizes), torch.tensor(rewards, dtype=torch.float64)


def _refuse_stray_tokens(mask: Tensor, places: Tensor, lengths: Sequence[int]) -> None:
    stray = mask.clone()
    stray[places] = False
    if bool(stray.any()):
        place = int(stray.nonzero()[0])
        sample = int(torch.tensor(lengths).cumsum(0).gt(place).nonzero()[0])
        token = place - sum(lengths[:sample])
        raise TurnTableError(
            f"sample {sample}: its loss mask trains token {token} of the response, which belongs to no turn"
        )
