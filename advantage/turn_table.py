"""The turn table: what the advantage needs to know about each sample's turns, as one plain tuple
per sample.

slime passes only a fixed list of keys to the training ranks (`_split_train_data_by_dp`). Of these,
`prompt` is unused, so the table travels there. slime's logger later sums every list that it does
not know, so the last reader removes the table from `rollout_data`. Layout of an entry:

    version, segment, first_turn, kind, terminated, truncated, group, bootstrap, turns

where `turns` has one tuple per turn: start, end, reward, action_start, anchor, staleness, moves,
skips, baseline.
"""

import enum
import hashlib
import math
import reprlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.settings import CONVERTER as CONVERTER

TABLE_KEY = "prompt"
"""Key of slime's train data that carries the table: one entry per sample, passed to the ranks
unchanged."""

VERSION = 7
"""First number of an entry. Version 4 was a float64 vector, which old dumps contain."""

STALENESS = "token_staleness"
"""Key of slime's rollout data: per sample, the staleness of each response token in actor updates;
-1 if unknown."""

PADDING_INDEX = -1
"""The entry of `sample_indices`, slime's column of sample indices, for a sample that only fills an
optimizer step."""

_ADVICE = f"configure --custom-convert-samples-to-train-data-path {CONVERTER}"
_EXACT = 2**53
"""Numbers below it are exact in float64, in which ranks exchange them."""


def _check_whole(least: int, **numbers: Any) -> None:
    for name, value in numbers.items():
        if type(value) is not int or not least <= value < _EXACT:
            raise TurnTableError(
                f"{name} must be an integer from {least} up and below 2**53, got {value!r}"
            )


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if type(value) is not bool:
            raise TurnTableError(f"{name} must be true or false, got {value!r}")


class TurnKind(enum.IntEnum):
    """What a sample stands for."""

    TURN = 0
    """One or more turns that the model played."""
    BOOTSTRAP = 1
    """The state after a cut or timed-out episode. Only its value is used; it is never trained
    on."""
    HELD_OUT = 2
    """Turns that value pretraining measures the critic on, and does not train on."""

    def __reduce_ex__(self, protocol: object) -> Any:
        # Python before 3.11.4 pickles a call of `getattr`, which torch rejects.
        return type(self), (self.value,)


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One turn inside a sample's response."""

    start: int
    """Offset of its first token, from the response's start."""
    end: int
    """Offset past its last token."""
    reward: float
    action_start: int = -1
    """Offset of the action's first token; -1 if no action was recognised."""
    anchor: int = -1
    """Hash of the environment state, for estimators that compare turns in the same state; -1:
    none."""
    staleness: int = -1
    """Actor updates between playing the turn and training on it; -1: unknown."""
    moves: bool = True
    """Whether the environment moved after the turn; not if the model only wrote its notes."""
    skips: int = 0
    """Turns of the episode, between this one and the sample's turn before it, that other samples
    hold."""
    baseline: float = 0.0
    """Mean return of continuations from before the turn, which `group_estimator: branches` compares
    its return with."""

    def __post_init__(self) -> None:
        _check_whole(0, start=self.start, end=self.end, skips=self.skips)
        _check_whole(
            -1, action_start=self.action_start, anchor=self.anchor, staleness=self.staleness
        )
        _check_flags(moves=self.moves)
        if self.start > self.end:
            raise TurnTableError(
                f"a turn must not end before its start {self.start}, got {self.end}"
            )
        if not (math.isfinite(self.reward) and math.isfinite(self.baseline)):
            raise TurnTableError(
                f"a turn's reward and baseline must be finite, got {self.reward}, {self.baseline}"
            )
        if self.action_start != -1 and not self.start <= self.action_start < self.end:
            raise TurnTableError(
                f"action_start must lie in its turn [{self.start}, {self.end}) or be -1, got "
                f"{self.action_start}"
            )


_NO_TURN = TurnSpan(0, 0, 0.0)
"""What the columns say of a bootstrap state."""

_span_of: Callable[[TurnSpan], tuple[Any, ...]] = attrgetter(
    *(field.name for field in fields(TurnSpan))
)
"""A turn as a plain tuple."""

_COLUMNS = 8 + len(fields(TurnSpan))


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One sample's entry in the turn table."""

    segment: int
    """Id of the episode's part in this batch: shared by all its samples, and by no other
    episode."""
    first_turn: int
    """Index of the sample's first turn in the segment or the episode, of which the batch holds
    consecutive turns."""
    kind: TurnKind = TurnKind.TURN
    terminated: bool = False
    """The sample's last turn ended the episode: nothing follows."""
    truncated: bool = False
    """The sample's last turn hit a limit. The value that follows is that of the bootstrap state, or
    0 without one."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns in order, without overlap; empty for a bootstrap sample."""
    group: int = -1
    """Id shared by episodes with the same start, for estimators that compare them; -1: none."""
    bootstrap: int = -1
    """Offset in the response of a masked token behind all turns, whose value is that of the state
    after them; -1: none. A sample of kind BOOTSTRAP has that value at its first token."""

    @property
    def indices(self) -> list[int]:
        """The index of each turn in the segment or the episode."""
        skipped = accumulate(turn.skips for turn in self.turns)
        return [self.first_turn + k + skips for k, skips in enumerate(skipped)]

    def __post_init__(self) -> None:
        _check_whole(0, segment=self.segment, first_turn=self.first_turn)
        _check_whole(-1, group=self.group, bootstrap=self.bootstrap)
        _check_flags(terminated=self.terminated, truncated=self.truncated)
        if self.kind is TurnKind.BOOTSTRAP and (self.turns or self.terminated or self.truncated):
            raise TurnTableError(
                "a bootstrap sample has no turns and neither terminates nor truncates"
            )
        first = self.turns[-1].end if self.turns else 0
        if self.bootstrap != -1 and (self.bootstrap < first or not self.turns):
            raise TurnTableError(
                "bootstrap must be the offset of a token behind the sample's turns, which end at "
                f"{first}, or -1 if there is none, got {self.bootstrap}"
            )
        if self.kind is not TurnKind.BOOTSTRAP and not self.turns:
            raise TurnTableError(f"a sample of kind {self.kind.name} needs at least one turn")
        for k, (before, after) in enumerate(pairwise(self.turns)):
            if after.start < before.end:
                raise TurnTableError(
                    f"turns must not overlap: turn {k} ends at {before.end}, turn {k + 1} starts "
                    f"at {after.start}"
                )


def encode_row(row: TurnRow) -> tuple[Any, ...]:
    """Write a row as a tuple of plain numbers; `decode_row` is the inverse.

    Example: what a converter of samples puts into slime's train data, one tuple per sample.

        turn = TurnSpan(start=0, end=21, reward=0.5, action_start=12)
        row = TurnRow(segment=3, first_turn=7, turns=(turn,))
        train_data[TABLE_KEY] = [encode_row(row), ...]
    """
    turns = tuple(map(_span_of, row.turns))
    return (
        VERSION,
        row.segment,
        row.first_turn,
        int(row.kind),
        row.terminated,
        row.truncated,
        row.group,
        row.bootstrap,
        turns,
    )


def _is_sequence(entry: Any) -> bool:
    return isinstance(entry, tuple | list)


def decode_row(entry: Any) -> TurnRow:
    """Read the row that `encode_row` wrote; raises TurnTableError for a damaged or foreign
    entry."""
    if not _is_sequence(entry) or len(entry) == 0:
        raise TurnTableError(
            f"expected a tuple that begins with version {VERSION}, got {reprlib.repr(entry)}"
        )
    version, *fields = entry
    if type(version) is not int or version != VERSION:
        raise TurnTableError(
            f"it has version {version!r:.40}, this project reads version {VERSION}"
        )
    try:
        segment, first_turn, kind, terminated, truncated, group, bootstrap, turns = fields
        spans = tuple(TurnSpan(*turn) for turn in turns)
        return TurnRow(
            segment, first_turn, TurnKind(kind), terminated, truncated, spans, group, bootstrap
        )
    except TurnTableError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise TurnTableError(f"it is damaged: {error}") from error


def to_list(x: Tensor) -> list[float]:
    """Convert a vector to a list; torch does not declare the type of the entries."""
    return cast(Any, x).tolist()


def anchor_of(token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> int:
    """Hash a prompt's tokens [n] to a number below 2**53, the anchor of the state that the prompt
    shows."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _EXACT


@dataclass(frozen=True)
class TurnColumns:
    """The turn tables of a rank's samples as columns on the CPU, all [T].

    There is one entry per turn and one per bootstrap state, in the order of the samples and of
    their tokens.
    """

    sample: Tensor
    """int64, position of the sample on this rank."""
    segment: Tensor
    """float64, as are index, reward, group and anchor."""
    index: Tensor
    """Index of the turn in its segment or episode."""
    bootstrap: Tensor
    """bool, as are held_out, moves, terminated and truncated; these two are set on the last turn of
    a sample only."""
    held_out: Tensor
    moves: Tensor
    terminated: Tensor
    truncated: Tensor
    start: Tensor
    """int64 offset in the sample's response, as are end and action_start. A bootstrap state is one
    token, start."""
    end: Tensor
    action_start: Tensor
    reward: Tensor
    group: Tensor
    anchor: Tensor
    staleness: Tensor
    """float64; -1 for a bootstrap entry."""
    baseline: Tensor
    """float64"""


def read_columns(table: Sequence[Any], response_lengths: Sequence[int]) -> TurnColumns:
    """Decode and check the rows of a rank's S samples; `response_lengths` [S] are in tokens.

    Raises TurnTableError, which names the sample, for anything but `encode_row`'s, or a turn
    outside its response.
    """
    if len(table) != len(response_lengths):
        raise TurnTableError(
            f"the turn table has {len(table)} rows for {len(response_lengths)} samples"
        )
    entries: list[tuple[Any, ...]] = []
    for sample, (entry, length) in enumerate(zip(table, response_lengths, strict=True)):
        row = _row_of(sample, entry, length)
        entries += _entries(sample, row)
    columns = as_tensor(np.array(entries, np.float64).reshape(len(entries), _COLUMNS)).unbind(1)
    sample, segment, index, bootstrap, held_out, terminated, truncated, group, *spans = columns
    start, end, reward, action_start, anchor, staleness, moves, _, baseline = spans
    return TurnColumns(
        sample=sample.long(),
        segment=segment,
        index=index,
        bootstrap=bootstrap.bool(),
        held_out=held_out.bool(),
        terminated=terminated.bool(),
        truncated=truncated.bool(),
        start=start.long(),
        end=end.long(),
        action_start=action_start.long(),
        reward=reward,
        group=group,
        anchor=anchor,
        staleness=staleness,
        moves=moves.bool(),
        baseline=baseline,
    )


def _row_of(sample: int, entry: Any, length: int) -> TurnRow:
    try:
        row = decode_row(entry)
    except TurnTableError as error:
        raise TurnTableError(
            f"sample {sample}: rollout_data[{TABLE_KEY!r}] is not a turn table ({error}); {_ADVICE}"
        ) from error
    end = max(row.turns[-1].end if row.turns else 0, row.bootstrap + 1)
    if end > length:
        what = "bootstrap state" if row.bootstrap != -1 else "last turn"
        raise TurnTableError(
            f"sample {sample}: its {what} ends at token {end}, its response has {length} tokens"
        )
    return row


def _entries(sample: int, row: TurnRow) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of turns and bootstrap state, in the order in which `read_columns` unpacks
    them."""

    def entry(index: int, turn: TurnSpan, is_state: bool = False, is_last: bool = False) -> Any:
        return (
            sample,
            row.segment,
            index,
            is_state,
            row.kind is TurnKind.HELD_OUT and not is_state,
            is_last and row.terminated,
            is_last and row.truncated,
            row.group,
            *_span_of(turn),
        )

    if not row.turns:
        yield entry(row.first_turn, _NO_TURN, is_state=True)
        return
    indices = row.indices
    for k, turn in enumerate(row.turns):
        yield entry(indices[k], turn, is_last=k == len(indices) - 1)
    if row.bootstrap != -1:
        state = replace(_NO_TURN, start=row.bootstrap, end=row.bootstrap)
        yield entry(indices[-1] + 1, state, is_state=True)


def read_turn_table(rollout_data: MutableMapping[str, Any], *, keep: bool) -> TurnColumns:
    """Decode the table, and unless a later hook needs it (`keep`), remove it; raises TurnTableError
    without a table."""
    if TABLE_KEY not in rollout_data:
        raise TurnTableError(f"rollout_data has no turn table under {TABLE_KEY!r}; {_ADVICE}")
    columns = read_columns(rollout_data[TABLE_KEY], rollout_data["response_lengths"])
    if not keep:
        del rollout_data[TABLE_KEY]
    return columns


def whole_numbers(values: Sequence[int]) -> Tensor:
    """Convert numbers to int64; NumPy reads a list several times as fast as `torch.tensor`."""
    return as_tensor(np.fromiter(values, np.int64, len(values)))


def as_tensor(x: np.ndarray[Any, Any]) -> Tensor:
    """Call `torch.from_numpy`, which torch does not type."""
    return cast(Any, torch).from_numpy(x)
