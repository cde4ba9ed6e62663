"""Packs the turn tokens of one rank's samples end to end, as the scan inside turns needs them.

With context parallelism, slime cuts a sequence into 2 x cp chunks; rank r holds the chunks r and 2 cp - 1 - r. A
response-aligned entry (value, log-prob) belongs to the rank that holds the position *before* its token. `local_tokens`
joins the rows of such a rank to one vector, and cuts the result again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.exchange import Layout
from advantage.turn_table import TurnColumns, as_tensor, to_list, whole_numbers


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
        """Join this rank's rows to a new vector [R]; the tokens of other ranks are 0, until an all-reduce adds them.

        Raises ValueError, which names the sample, for a row of another length than the layout's.
        """
        for i, (row, held) in enumerate(zip(rows, self.held, strict=True)):
            if row.numel() != held:
                raise ValueError(f"sample {i} has {row.numel()} entries on this rank, but its layout has {held}")
        local = torch.cat(list(rows)) if rows else torch.zeros(0)
        if self.positions is None:
            return local
        return local.new_zeros(sum(self.lengths)).index_copy_(0, self.positions.to(local.device), local)

    def pick(self, flat: Tensor) -> Tensor:
        """Pick this rank's entries of a vector [R]."""
        return flat if self.positions is None else flat[self.positions.to(flat.device)]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Cut this rank's part of a vector [R] into one row per sample; the rows share memory."""
        # The plain split also records every row as a view for autograd, which takes half as long again.
        return list(torch.unsafe_split_with_sizes(self.pick(flat), list(self.held)))


def local_tokens(rollout_data: Mapping[str, Any], layout: Layout) -> LocalTokens:
    """Find the response tokens of slime's `rollout_data` that this rank holds."""
    responses = rollout_data["response_lengths"]
    if layout.context.size == 1:
        return LocalTokens(responses, responses, None)
    lengths = torch.tensor(responses, dtype=torch.long)
    totals = torch.tensor(rollout_data["total_lengths"], dtype=torch.long)
    # The two half-open ranges of response offsets that this rank holds of each sample, [S, 2, 2].
    rank, chunks = layout.context.rank, 2 * layout.context.size
    chunk = ((totals + chunks - 1) // chunks)[:, None]
    starts = torch.tensor([rank, chunks - 1 - rank]) * chunk - (totals - lengths - 1)[:, None]
    spans = torch.stack([starts, starts + chunk], -1)
    spans = torch.minimum(spans.clamp(min=0), lengths[:, None, None])
    offsets = lengths.cumsum(0) - lengths
    sizes = spans[..., 1] - spans[..., 0]
    positions = span_positions((spans[..., 0] + offsets[:, None]).reshape(-1), sizes.reshape(-1))
    held: list[int] = cast(Any, sizes.sum(1)).tolist()
    return LocalTokens(responses, held, positions)


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

    def check_finite(self, what: str, packed: Tensor, lengths: Sequence[int]) -> None:
        """Raise ValueError, which names sample and token, unless all packed entries [N] are finite."""
        # One sum is several times cheaper than checking every entry, so entries are checked only if it is not finite.
        if not math.isfinite(float(packed.sum())) and bool((wrong := ~torch.isfinite(packed)).any()):
            at = int(wrong.nonzero()[0])
            sample, token = _place(at if self.positions is None else int(self.positions[at]), lengths)
            raise ValueError(f"sample {sample}, response token {token}: {what} is {packed[at].item()}, not finite")

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
        sample, token = _place(int(stray.nonzero()[0]), lengths)
        raise TurnTableError(
            f"sample {sample}: its loss mask includes token {token} of the response, which belongs to no turn"
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


def _place(position: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Find the sample, and the token of its response, at a position among all R response tokens."""
    sample = int(whole_numbers(lengths).cumsum(0).gt(position).nonzero()[0])
    return sample, position - sum(lengths[:sample])


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
