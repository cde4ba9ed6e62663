"""Packs the turn tokens of one rank's samples end to end, as the scan inside turns needs them.

With context parallelism, slime cuts a sequence into 2 x cp chunks; rank r holds the chunks r and 2
cp - 1 - r. A response-aligned entry (value, log-prob) belongs to the rank that holds the position
*before* its token. `local_tokens` joins the rows of such a rank to one vector, and cuts the result
again.
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
    """The response tokens that this rank holds, of the R response tokens of its samples laid end to
    end."""

    lengths: Sequence[int]
    """Response tokens of each sample."""
    held: Sequence[int]
    """How many of them this rank holds."""
    positions: Tensor | None
    """Positions of the held tokens among all R; None if this rank holds all of them."""

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Join this rank's rows to a new vector [R]; the tokens of other ranks are 0, until an
        all-reduce adds them.

        Raises ValueError, which names the sample, for a row of another length than the layout's.
        """
        for i, (row, held) in enumerate(zip(rows, self.held, strict=True)):
            if row.numel() != held:
                raise ValueError(
                    f"sample {i} has {row.numel()} entries on this rank, but its layout has {held}"
                )
        local = torch.cat(list(rows)) if rows else torch.zeros(0)
        if self.positions is None:
            return local
        joined = local.new_zeros(sum(self.lengths))
        positions = self.positions.to(local.device)
        return joined.index_copy_(0, positions, local)

    def pick(self, flat: Tensor) -> Tensor:
        """Pick this rank's entries of a vector [R]."""
        if self.positions is None:
            return flat
        return flat[self.positions.to(flat.device)]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Cut this rank's part of a vector [R] into one row per sample; the rows share memory."""
        own = self.pick(flat)
        # The plain split also records every row as a view for autograd, which takes half as long
        # again.
        rows = torch.unsafe_split_with_sizes(own, list(self.held))
        return list(rows)


def local_tokens(rollout_data: Mapping[str, Any], layout: Layout) -> LocalTokens:
    """Find the response tokens of slime's `rollout_data` that this rank holds."""
    responses = rollout_data["response_lengths"]
    if layout.context.size == 1:
        return LocalTokens(responses, responses, None)
    lengths = torch.tensor(responses, dtype=torch.long)
    totals = torch.tensor(rollout_data["total_lengths"], dtype=torch.long)
    rank = layout.context.rank
    chunks = 2 * layout.context.size
    size_of_chunk = (totals + chunks - 1) // chunks
    first_offset = totals - lengths - 1
    offset_in_batch = lengths.cumsum(0) - lengths
    # The two half-open ranges of response offsets that this rank holds of each sample, [S, 2].
    numbers = torch.tensor([rank, chunks - 1 - rank])
    starts = numbers * size_of_chunk[:, None] - first_offset[:, None]
    ends = starts + size_of_chunk[:, None]
    longest = lengths[:, None]
    starts = torch.minimum(starts.clamp(min=0), longest)
    ends = torch.minimum(ends.clamp(min=0), longest)
    sizes = ends - starts
    places = starts + offset_in_batch[:, None]
    positions = span_positions(places.reshape(-1), sizes.reshape(-1))
    held: list[int] = cast(Any, sizes.sum(1)).tolist()
    return LocalTokens(responses, held, positions)


def _nonzero(flags: Tensor) -> Tensor:
    if flags.device.type == "cpu":
        return as_tensor(np.flatnonzero(flags))  # several times as fast as torch
    return flags.nonzero()[:, 0]


class TrainedRuns:
    """The loss masks of all responses end to end, as a bool vector and as runs of trained
    tokens."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        inner = mask[1:] ^ mask[:-1]
        edges = torch.cat([mask[:1], inner, mask[-1:]])
        changes = _nonzero(edges)
        self.starts = changes[0::2].contiguous()
        ends = changes[1::2]
        sizes = ends - self.starts
        self._ends = F.pad(ends, (1, 0))
        self._before = F.pad(sizes.cumsum(0), (1, 0))
        self.total = self._before[-1]
        """The number of trained tokens."""

    def before(self, positions: Tensor) -> Tensor:
        """Count the trained tokens before each position."""
        run = torch.searchsorted(self.starts, positions)
        left = self._ends[run] - positions
        return self._before[run] - left.clamp(min=0)


@dataclass(frozen=True)
class PackedTurns:
    """The turns of one rank's samples, in order; positions are those of the R response tokens laid
    end to end."""

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
        if self.positions is None:
            return flat
        return flat.index_select(0, self.positions)

    def put(self, packed: Tensor) -> Tensor:
        """Put packed tokens [N] back among all response tokens [R]; 0 where they are not packed."""
        if self.positions is None:
            return packed
        everywhere = packed.new_zeros(len(self.runs.mask))
        return everywhere.index_copy_(0, self.positions, packed)

    def check_finite(self, what: str, packed: Tensor, lengths: Sequence[int]) -> None:
        """Raise ValueError, which names sample and token, unless all packed entries [N] are
        finite."""
        # One sum is several times cheaper than checking every entry, so entries are checked only if
        # it is not finite.
        if math.isfinite(float(packed.sum())):
            return
        wrong = (~torch.isfinite(packed)).nonzero()
        if not len(wrong):
            return
        at = int(wrong[0])
        position = at if self.positions is None else int(self.positions[at])
        sample, token = _place(position, lengths)
        value = float(packed[at])
        raise ValueError(f"sample {sample}, response token {token}: {what} is {value}, not finite")

    @property
    def untrained(self) -> Tensor:
        """The packed tokens that are not trained, as indices below N."""
        quiet = ~self.trained
        return span_positions(self.starts[quiet], self.lengths[quiet])

    @property
    def starts(self) -> Tensor:
        """The first packed token of each turn, as an index below N; [T]."""
        return self.lengths.cumsum(0) - self.lengths


def pack_turns(
    columns: TurnColumns, masks: Sequence[Tensor], lengths: Sequence[int]
) -> PackedTurns:
    """Pack the tokens of all turns, with one entry per turn and one per bootstrap state.

    Masked tokens inside a turn are skipped, so a turn's reward falls on its last trained token. A
    fully masked turn keeps all its tokens: values and rewards pass through it, but it gets no
    gradient. `masks` has one entry per response token. Raises TurnTableError for a trained token
    outside all turns, or a bootstrap sample without token.
    """
    for i, (row, length) in enumerate(zip(masks, lengths, strict=True)):
        if row.numel() != length:
            raise TurnTableError(
                f"sample {i}: its loss mask has {row.numel()} entries for {length} response tokens"
            )
    mask = torch.cat(list(masks) or [torch.zeros(0)]).bool()
    runs = TrainedRuns(mask)
    starts, sizes = _spans(columns, lengths)
    # One transfer to the device of the masks.
    moved = torch.stack([starts, sizes, columns.bootstrap, columns.moves]).to(mask.device)
    starts, sizes, bootstrap, moves = moved.unbind(0)
    bootstrap = bootstrap.bool()
    counts = runs.before(starts + sizes) - runs.before(starts)
    counts = counts * ~bootstrap
    trained = counts > 0
    kept = torch.where(trained, counts, sizes)
    sums = torch.stack([counts.sum(), runs.total, kept.sum()])
    inside, everywhere, packed = to_list(sums)
    if inside != everywhere:
        stray = mask.clone()
        stray[span_positions(starts, sizes * ~bootstrap)] = False
        sample, token = _place(int(stray.nonzero()[0]), lengths)
        raise TurnTableError(
            f"sample {sample}: its loss mask includes token {token} of the response, which belongs "
            "to no turn"
        )
    positions = None
    if packed != len(mask):
        positions = span_positions(starts, sizes)
        untrained = torch.repeat_interleave(~trained, sizes)
        positions = positions[mask[positions] | untrained]
    return PackedTurns(
        runs=runs,
        positions=positions,
        lengths=kept,
        rewards=columns.reward.to(mask.device),
        trained=trained,
        bootstrap=bootstrap,
        moves=moves.bool(),
    )


def check_first_tokens(packed: PackedTurns, lengths: Sequence[int]) -> None:
    """Raise TurnTableError unless the loss mask, all that the value loss has, shows where turns
    begin."""
    sizes = whole_numbers(lengths)
    ends = sizes.cumsum(0)
    starts = (ends - sizes)[sizes > 0].to(packed.trained.device)
    runs = packed.runs
    unique: Callable[..., Any] = cast(Any, torch).unique
    trained_starts = starts[runs.mask[starts]]
    found: Tensor = unique(torch.cat([runs.starts, trained_starts]))
    real = packed.starts[packed.trained]
    if packed.positions is not None:
        real = packed.positions[real]
    if torch.equal(found, real):
        return
    begins, counts = unique(torch.cat([found, real]), return_counts=True)
    wrong = int(begins[counts == 1][0])
    sample = int((ends <= wrong).sum())
    end = int(ends[sample])
    start = end - int(sizes[sample])

    def inside(positions: Tensor) -> list[int]:
        own = positions[(positions >= start) & (positions < end)]
        return cast(Any, own - start).tolist()

    raise TurnTableError(
        f"sample {sample}: its turns begin at tokens {inside(real)}, but its loss mask has runs "
        f"beginning at {inside(found)}, so value_first_token_weight cannot find the first tokens; "
        "mask a token between turns and none inside a turn, or set value_first_token_weight: 1.0"
    )


def span_positions(starts: Tensor, sizes: Tensor) -> Tensor:
    """List all positions in the spans [start, start + size), span after span."""
    span = torch.repeat_interleave(sizes)
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(len(span), device=sizes.device) + shift[span]


def per_token(
    entries: Tensor, columns: TurnColumns, lengths: Sequence[int], otherwise: float
) -> Tensor:
    """Repeat each turn's entry at all of its tokens, [R] float32 of [T]; `otherwise` at tokens
    outside all turns."""
    starts, sizes = _spans(columns, lengths)
    found = torch.full((sum(lengths),), otherwise)
    found[span_positions(starts, sizes)] = torch.repeat_interleave(entries.float(), sizes)
    return found


def _place(position: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Find the sample, and the token of its response, at a position among all R response tokens."""
    ends = whole_numbers(lengths).cumsum(0)
    sample = int((ends <= position).sum())
    return sample, position - sum(lengths[:sample])


def _spans(columns: TurnColumns, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Start position and size of each turn; a bootstrap state is one token."""
    responses = whole_numbers(lengths)
    offsets = responses.cumsum(0) - responses
    starts = offsets[columns.sample] + columns.start
    sizes = torch.where(columns.bootstrap, 1, columns.end - columns.start)
    empty = columns.bootstrap & (responses[columns.sample] == 0)
    if bool(empty.any()):
        sample = int(columns.sample[empty][0])
        raise TurnTableError(
            f"sample {sample}: a bootstrap sample needs one response token to hold its value"
        )
    return starts, sizes
