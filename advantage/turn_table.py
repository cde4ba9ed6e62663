"""The turn table: what the advantage needs to know about each sample's turns, as one float64 vector per sample.

slime passes only a fixed list of keys to the training ranks (`_split_train_data_by_dp`). Of these, `prompt` is unused,
so the table travels there. slime's logger later sums every list that it does not know, so the last reader removes the
table from `rollout_data`. Layout, version 4 (integers are exact up to 2**53):

    magic, version, segment, first_turn, kind, terminated, truncated, group, n,
    then n times: start, end, reward, action_start, anchor, staleness, moves
"""

import enum
import hashlib
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.settings import CONVERTER as CONVERTER

TABLE_KEY = "prompt"
"""Key of slime's train data that carries the table: one entry per sample, passed to the ranks unchanged."""

STALENESS = "token_staleness"
"""Key of slime's rollout data: per sample, the staleness of each response token in actor updates; -1 if unknown."""

PADDING_INDEX = -1
"""The entry of `sample_indices`, slime's column of sample indices, for a sample that only fills an optimizer step."""

_ADVICE = f"configure --custom-convert-samples-to-train-data-path {CONVERTER}"

_MAGIC = 7_206_381_955.0
_VERSION = 4.0
_HEAD = 9
_SPAN = 7
_EXACT = 2**53
_NO_TURN = (0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 1.0)


class TurnKind(enum.IntEnum):
    """What a sample stands for."""

    TURN = 0
    """One or more turns that the model played."""
    BOOTSTRAP = 1
    """The state after a cut or timed-out episode. Only its value is used; it is never trained on."""
    HELD_OUT = 2
    """Turns that value pretraining measures the critic on, and does not train on."""

    def __reduce_ex__(self, protocol: object) -> Any:
        return type(self), (self.value,)  # Python before 3.11.4 pickles a call of `getattr`, which torch rejects


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
    """Hash of the environment state, for estimators that compare turns in the same state; -1: none."""
    staleness: int = -1
    """Actor updates between playing the turn and training on it; -1: unknown."""
    moves: bool = True
    """Whether the environment moved after the turn; not if the model only wrote its notes."""

    def __post_init__(self) -> None:
        if not 0 <= _int("start", self.start) <= _int("end", self.end):
            raise TurnTableError(f"a turn must have 0 <= start <= end, got start {self.start}, end {self.end}")
        if not math.isfinite(self.reward):
            raise TurnTableError(f"a turn's reward must be finite, got {self.reward}")
        if self.action_start != -1 and not self.start <= _int("action_start", self.action_start) < self.end:
            raise TurnTableError(
                f"action_start must lie in its turn [{self.start}, {self.end}) or be -1, got {self.action_start}"
            )
        for name, value in (("anchor", self.anchor), ("staleness", self.staleness)):
            if _int(name, value) < -1:
                raise TurnTableError(f"{name} must be a number from 0 up, or -1 if there is none, got {value}")


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One sample's entry in the turn table."""

    segment: int
    """Id of the episode's part in this batch: shared by all its samples, and by no other episode."""
    first_turn: int
    """Index of the sample's first turn in the segment or the episode; consecutive along the segment."""
    kind: TurnKind = TurnKind.TURN
    terminated: bool = False
    """The sample's last turn ended the episode: nothing follows."""
    truncated: bool = False
    """The sample's last turn hit a limit. The value that follows comes from a bootstrap sample, or is 0 without one."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns in order, without overlap; empty for a bootstrap sample."""
    group: int = -1
    """Id shared by episodes with the same start, for estimators that compare them; -1: none."""

    def __post_init__(self) -> None:
        if _int("segment", self.segment) < 0 or _int("first_turn", self.first_turn) < 0:
            raise TurnTableError(f"segment {self.segment} and first_turn {self.first_turn} must not be negative")
        if _int("group", self.group) < -1:
            raise TurnTableError(f"group must be a number from 0 up, or -1 for none, got {self.group}")
        if self.kind is TurnKind.BOOTSTRAP and (self.turns or self.terminated or self.truncated):
            raise TurnTableError("a bootstrap sample has no turns and neither terminates nor truncates")
        if self.kind is not TurnKind.BOOTSTRAP and not self.turns:
            raise TurnTableError(f"a sample of kind {self.kind.name} needs at least one turn")
        for k, (before, after) in enumerate(pairwise(self.turns)):
            if after.start < before.end:
                raise TurnTableError(
                    f"turns must not overlap: turn {k} ends at {before.end}, turn {k + 1} starts at {after.start}"
                )


def encode_row(row: TurnRow) -> Tensor:
    """Write a row as a float64 vector of 9 + 7 x turns entries; `decode_row` is the inverse.

    Example: what a converter of samples puts into slime's train data, one vector per sample.

        row = TurnRow(segment=3, first_turn=7, turns=(TurnSpan(start=0, end=21, reward=0.5, action_start=12),))
        train_data[TABLE_KEY] = [encode_row(row), ...]
    """
    head = [_MAGIC, _VERSION, row.segment, row.first_turn, row.kind, row.terminated, row.truncated, row.group]
    body = [x for t in row.turns for x in (t.start, t.end, t.reward, t.action_start, t.anchor, t.staleness, t.moves)]
    return as_tensor(np.array([*head, len(row.turns), *body], np.float64))


def decode_row(vector: object) -> TurnRow:
    """Read the row that `encode_row` wrote; raises TurnTableError for a damaged or foreign vector."""
    if isinstance(vector, np.ndarray):
        vector = as_tensor(cast(Any, vector))
    if not isinstance(vector, Tensor) or vector.dtype != torch.float64 or vector.dim() != 1:
        kind = f"{vector.dtype} of shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
        raise TurnTableError(f"expected a float64 vector, got {kind}")
    data = to_list(vector)
    if not data or data[0] != _MAGIC:
        raise TurnTableError("it does not start with the turn table's magic number")
    if len(data) < _HEAD or data[1] != _VERSION:
        raise TurnTableError(f"it has version {data[1:2]}, this project reads version {_VERSION:g}")
    segment, first_turn, kind, terminated, truncated, group, n = (_whole(x) for x in data[2:_HEAD])
    if len(data) != _HEAD + _SPAN * n:
        raise TurnTableError(f"it declares {n} turns but has {len(data)} entries, not {_HEAD + _SPAN * n}")
    if not {terminated, truncated, *data[_HEAD + _SPAN - 1 :: _SPAN]} <= {0, 1} or kind not in list(TurnKind):
        raise TurnTableError(
            f"kind {kind} must be 0 to 2, terminated {terminated}, truncated {truncated}, moves 0 or 1"
        )
    turns: list[TurnSpan] = []
    for at in range(_HEAD, len(data), _SPAN):
        start, end, reward, *rest, moves = data[at : at + _SPAN]
        turns.append(TurnSpan(_whole(start), _whole(end), reward, *map(_whole, rest), moves=bool(moves)))
    return TurnRow(segment, first_turn, TurnKind(kind), bool(terminated), bool(truncated), tuple(turns), group)


def to_list(x: Tensor) -> list[float]:
    """Convert a vector to a list; torch does not declare the type of the entries."""
    return cast(Any, x).tolist()


def anchor_of(token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> int:
    """Hash a prompt's tokens [n] to a number below 2**53, the anchor of the state that the prompt shows."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _EXACT


@dataclass(frozen=True)
class TurnColumns:
    """The turn tables of a rank's samples as columns on the CPU, all [T].

    There is one entry per turn and one per bootstrap sample, in the order of the samples.
    """

    sample: Tensor
    """int64, position of the sample on this rank."""
    segment: Tensor
    """float64, as are index, reward, group and anchor."""
    index: Tensor
    """Index of the turn in its segment or episode."""
    bootstrap: Tensor
    """bool, as are held_out, moves, terminated and truncated; these two are set on the last turn of a sample only."""
    held_out: Tensor
    moves: Tensor
    terminated: Tensor
    truncated: Tensor
    start: Tensor
    """int64 offset in the sample's response, as are end and action_start; a bootstrap entry has 0, 0 and -1."""
    end: Tensor
    action_start: Tensor
    reward: Tensor
    group: Tensor
    anchor: Tensor
    staleness: Tensor
    """float64; -1 for a bootstrap entry."""


def read_columns(vectors: Sequence[Any], response_lengths: Sequence[int]) -> TurnColumns:
    """Decode and check all rows of a rank's S samples together; `response_lengths` [S] are in tokens.

    Raises TurnTableError, which names the sample, for anything but `encode_row`'s, or a turn outside its response.
    """
    if len(vectors) != len(response_lengths):
        raise TurnTableError(f"the turn table has {len(vectors)} rows for {len(response_lengths)} samples")
    if (columns := _columns(vectors, response_lengths)) is not None:
        return columns
    for i, (vector, length) in enumerate(zip(vectors, response_lengths, strict=True)):  # which row is not valid?
        try:
            row = decode_row(vector)
        except TurnTableError as error:
            raise TurnTableError(
                f"sample {i}: rollout_data[{TABLE_KEY!r}] is not a turn table ({error}); {_ADVICE}"
            ) from error
        if row.turns and row.turns[-1].end > length:
            raise TurnTableError(
                f"sample {i}: its last turn ends at token {row.turns[-1].end}, its response has {length} tokens"
            )
    raise TurnTableError("the turn table is damaged")


def _columns(vectors: Sequence[Any], response_lengths: Sequence[int]) -> TurnColumns | None:
    """The rows as columns; None if any row is not valid."""
    try:
        flat = as_tensor(np.concatenate([*vectors, np.zeros(0)]))
        sizes = whole_numbers(list(map(len, vectors)))
    except (TypeError, ValueError, RuntimeError):  # something is not a vector
        return None
    if flat.dtype != torch.float64 or flat.dim() != 1 or bool((sizes < _HEAD).any()):
        return None
    starts = sizes.cumsum(0) - sizes
    head = flat[starts[:, None] + torch.arange(_HEAD)].unbind(1)
    if not _valid_heads(head, sizes):
        return None
    segment, first_turn, kind, terminated, truncated, group = head[2:8]
    turns = head[8].long()
    entries = turns.clamp(min=1)
    sample = torch.repeat_interleave(entries)
    ends = entries.cumsum(0)
    k = torch.arange(len(sample)) - (ends - entries)[sample]
    bootstrap = kind[sample] == TurnKind.BOOTSTRAP
    # A bootstrap row has no body; its entry reads from the row's head, and its columns are then overwritten.
    body_at = torch.where(bootstrap, starts[sample], starts[sample] + _HEAD + _SPAN * k)
    body = flat[body_at[:, None] + torch.arange(_SPAN)]
    body = torch.where(bootstrap[:, None], torch.tensor(_NO_TURN, dtype=torch.float64), body)
    if not _valid_bodies(body, sample, whole_numbers(response_lengths)[sample]):
        return None
    last = torch.zeros(len(sample), dtype=torch.bool)
    last[ends - 1] = True
    start, end, reward, action_start, anchor, staleness, moves = body.unbind(1)
    return TurnColumns(
        sample=sample,
        segment=segment[sample],
        index=first_turn[sample] + k,
        bootstrap=bootstrap,
        held_out=kind[sample] == TurnKind.HELD_OUT,
        terminated=(terminated[sample] == 1) & last,
        truncated=(truncated[sample] == 1) & last,
        start=start.long(),
        end=end.long(),
        action_start=action_start.long(),
        reward=reward,
        group=group[sample],
        anchor=anchor,
        staleness=staleness,
        moves=moves == 1,
    )


def _valid_heads(head: Sequence[Tensor], sizes: Tensor) -> bool:
    """What `TurnRow` and `decode_row` check of a row before its turns; each entry of `head` is [S]."""
    magic, version, segment, first_turn, kind, terminated, truncated, group, turns = head
    flags = torch.stack([terminated, truncated])
    valid = (magic == _MAGIC) & (version == _VERSION) & (sizes == _HEAD + _SPAN * turns)
    valid &= _whole_from(0, segment) & _whole_from(0, first_turn) & _whole_from(-1, group)
    valid &= ((flags == 0) | (flags == 1)).all(0) & _whole_from(0, kind) & (kind <= max(TurnKind))
    valid &= torch.where(kind == TurnKind.BOOTSTRAP, (turns == 0) & (flags == 0).all(0), turns > 0)
    return bool(valid.all())


def _valid_bodies(body: Tensor, sample: Tensor, lengths: Tensor) -> bool:
    """What `TurnSpan` and `read_columns` check of turns [T, 7]; `lengths` [T] are those of their responses."""
    start, end, reward, action_start, anchor, staleness, moves = body.unbind(1)
    valid = _whole_from(0, start) & _whole_from(0, end) & (start <= end) & (end <= lengths)
    valid &= torch.isfinite(reward) & _whole_from(-1, anchor) & _whole_from(-1, action_start)
    valid &= _whole_from(-1, staleness) & ((moves == 0) | (moves == 1))
    valid &= (action_start == -1) | ((start <= action_start) & (action_start < end))
    apart = (start[1:] >= end[:-1]) | (sample[1:] != sample[:-1])
    return bool(valid.all()) and bool(apart.all())


def _whole_from(least: int, x: Tensor) -> Tensor:
    """Whether entries are whole numbers of at least `least` that float64 holds exactly."""
    return (x >= least) & (x < _EXACT) & (x == x.floor())


def read_turn_table(rollout_data: MutableMapping[str, Any], *, keep: bool) -> TurnColumns:
    """Decode the table, and unless a later hook needs it (`keep`), remove it; raises TurnTableError without a table."""
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


def _int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_EXACT < value < _EXACT:
        raise TurnTableError(f"{name} must be an integer of magnitude below 2**53, got {value!r}")
    return value


def _whole(value: float) -> int:
    if not math.isfinite(value) or value != int(value):
        raise TurnTableError(f"expected a whole number, got {value}")
    return int(value)
