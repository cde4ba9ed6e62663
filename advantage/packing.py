"""Packs the turn tokens of one rank's samples end to end, as the scan inside turns needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.turn_table import TurnColumns, as_tensor, to_list, whole_numbers


class TrainedRuns:
    """The loss masks of all responses end to end, as a bool vector and as runs of trained tokens."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        edges = torch.cat([mask[:1], mask[1:] ^ mask[:-1], mask[-1:]])
        # NumPy is several times as fast on a CPU.
        changes = as_tensor(np.flatnonzero(edges)) if mask.device.type == "cpu" else edges.nonzero()[:, 0]
        self.starts, self._ends = changes[0::2].contiguous(), changes[1::2]
        self._before = F.pad((self._ends - self.starts).cumsum(0), (1, 0))
        self.total = self._before[-1]
        """The number of trained tokens."""

    def before(self, positions: Tensor) -> Tensor:
        """Count the trained tokens before each position."""
        run = torch.searchsorted(self.starts, positions)
        return self._before[run] - (F.pad(self._ends, (1, 0))[run] - positions).clamp(min=0)


@dataclass(frozen=True)
class PackedTurns:
    """The turns of one rank's samples, in order; positions are those of the R response tokens laid end to end."""

    runs: TrainedRuns
    positions: Tensor | None
    """[N] position of each packed token; None if every response token is packed, so N = R."""
    lengths: Tensor
    """[T] packed tokens per turn; 1 for a bootstrap state."""
    rewards: Tensor
    """[T] float64."""
    trained: Tensor
    """[T] whether the turn's packed tokens are trained: all of them are, or none."""
    bootstrap: Tensor
    moves: Tensor
    """[T] whether the environment moved after the turn."""

    def take(self, flat: Tensor) -> Tensor:
        """Pick the packed tokens [N] from all response tokens [R]."""
        return flat if self.positions is None else flat.index_select(0, self.positions)

    def put(self, packed: Tensor) -> Tensor:
        """Put packed tokens [N] back among all response tokens [R]; 0 where they are not packed."""
        if self.positions is None:
            return packed
        return packed.new_zeros(len(self.runs.mask)).index_copy_(0, self.positions, packed)

    @property
    def untrained(self) -> Tensor:
        """The packed tokens that are not trained, as indices below N."""
        quiet = ~self.trained
        return span_positions((self.lengths.cumsum(0) - self.lengths)[quiet], self.lengths[quiet])


def pack_turns(columns: TurnColumns, masks: Sequence[Tensor], lengths: Sequence[int]) -> PackedTurns:
    """Pack the tokens of all turns, with one entry per turn and one per bootstrap sample.

    Masked tokens inside a turn are skipped, so a turn's reward falls on its last trained token. A fully masked turn
    keeps all its tokens: values and rewards pass through it, but it gets no gradient. `masks` has one entry per
    response token. Raises TurnTableError for a trained token outside all turns, or a bootstrap sample without token.
    """
    for i, (row, length) in enumerate(zip(masks, lengths, strict=True)):
        if row.numel() != length:
            raise TurnTableError(f"sample {i}: its loss mask has {row.numel()} entries for {length} response tokens")
    mask = torch.cat(list(masks)).bool() if masks else torch.zeros(0, dtype=torch.bool)
    runs = TrainedRuns(mask)
    starts, sizes = _spans(columns, lengths)
    spans = torch.stack([starts, sizes, columns.bootstrap.long(), columns.moves.long()]).to(mask.device)
    starts, sizes, bootstrap, moves = spans[0], spans[1], spans[2].bool(), spans[3].bool()
    counts = (runs.before(starts + sizes) - runs.before(starts)) * ~bootstrap
    trained = counts > 0
    kept = torch.where(trained, counts, sizes)
    inside, everywhere, packed = to_list(torch.stack([counts.sum(), runs.total, kept.sum()]))
    if inside != everywhere:
        stray = mask.clone()
        stray[span_positions(starts, sizes * ~bootstrap)] = False
        position = int(stray.nonzero()[0])
        sample = int(torch.tensor(lengths).cumsum(0).gt(position).nonzero()[0])
        raise TurnTableError(
            f"sample {sample}: its loss mask includes token {position - sum(lengths[:sample])} of the response, which "
            "belongs to no turn"
        )
    positions = None
    if packed != len(mask):
        positions = span_positions(starts, sizes)
        positions = positions[mask[positions] | torch.repeat_interleave(~trained, sizes)]
    return PackedTurns(runs, positions, kept, columns.reward.to(mask.device), trained, bootstrap, moves)


def check_first_tokens(packed: PackedTurns, lengths: Sequence[int]) -> None:
    """Raise TurnTableError unless the loss mask, all that the value loss has, shows where turns begin."""
    sizes = whole_numbers(lengths)
    ends = sizes.cumsum(0)
    starts = (ends - sizes)[sizes > 0].to(packed.trained.device)
    runs = packed.runs
    unique: Callable[..., Any] = cast(Any, torch).unique
    found: Tensor = unique(torch.cat([runs.starts, starts[runs.mask[starts]]]))
    real = (packed.lengths.cumsum(0) - packed.lengths)[packed.trained]
    real = real if packed.positions is None else packed.positions[real]
    if torch.equal(found, real):
        return
    begins, counts = unique(torch.cat([found, real]), return_counts=True)
    wrong = int(begins[counts == 1][0])
    i = int((ends <= wrong).sum())
    start, end = int(ends[i] - sizes[i]), int(ends[i])
    inside = [[int(j) - start for j in x.unbind(0) if start <= int(j) < end] for x in (real, found)]
    raise TurnTableError(
        f"sample {i}: its turns begin at tokens {inside[0]}, but its loss mask has runs beginning at {inside[1]}, so "
        "value_first_token_weight cannot find the first tokens; mask a token between turns and none inside a turn, or "
        "set value_first_token_weight: 1.0"
    )


def span_positions(starts: Tensor, sizes: Tensor) -> Tensor:
    """List all positions in the spans [start, start + size), span after span."""
    span = torch.repeat_interleave(sizes)
    return torch.arange(len(span), device=sizes.device) + (starts - (sizes.cumsum(0) - sizes))[span]


def per_token(entries: Tensor, columns: TurnColumns, lengths: Sequence[int], otherwise: float) -> Tensor:
    """Repeat each turn's entry at all of its tokens, [R] float32 of [T]; `otherwise` at tokens outside all turns."""
    starts, sizes = _spans(columns, lengths)
    found = torch.full((sum(lengths),), otherwise)
    found[span_positions(starts, sizes)] = torch.repeat_interleave(entries.float(), sizes)
    return found


def _spans(columns: TurnColumns, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Start position and size of each turn; a bootstrap state is the first token of its response."""
    responses = whole_numbers(lengths)
    starts = (responses.cumsum(0) - responses)[columns.sample] + columns.start
    sizes = torch.where(columns.bootstrap, 1, columns.end - columns.start)
    empty = columns.bootstrap & (responses[columns.sample] == 0)
    if bool(empty.any()):
        sample = int(columns.sample[empty][0])
        raise TurnTableError(f"sample {sample}: a bootstrap sample needs one response token to hold its value")
    return starts, sizes
