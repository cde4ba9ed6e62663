"""Exchanges turns between data-parallel ranks, because the turns of one episode may be on any rank in any order.

The previous turn sees a turn through its value V and advantage A, and both are affine in those of the next turn:

    V = v + w V',   A = a + p V' + q A'      (' : the next turn's)

So each turn sends eight numbers, however many tokens it has: segment, index, flags, v, w, a, p and q. There are two
collectives, first the number of turns and then the turns. Every rank then solves all chains.

If one rank failed, the others would wait in a collective forever. `relayed` and `report_failure` turn a failure on one
rank into a failure on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.errors import OtherRankError, TurnTableError
from advantage.maths.chain import gather_next, solve_chain
from advantage.ranks import Group
from advantage.turn_table import TurnColumns

TERMINATED, TRUNCATED, BOOTSTRAP = 1, 2, 4


@dataclass(frozen=True)
class TurnFacts:
    """One entry per turn or bootstrap state, all [T] float64; the module's docstring defines v, w, a, p and q."""

    segment: Tensor
    index: Tensor
    flags: Tensor
    """Sum of TERMINATED, TRUNCATED and BOOTSTRAP."""
    v: Tensor
    w: Tensor
    a: Tensor
    p: Tensor
    q: Tensor

    def stacked(self) -> Tensor:
        columns = (self.segment, self.index, self.flags, self.v, self.w, self.a, self.p, self.q)
        return torch.stack([x.double() for x in columns], 1)


@dataclass(frozen=True)
class ExchangeReport:
    """The size of one exchange."""

    turns: int
    """Turns and bootstrap states on all ranks."""
    ranks: int
    bytes_sent: int
    """By this rank."""
    bytes_received: int
    """By this rank, from the others."""


def turn_flags(columns: TurnColumns) -> Tensor:
    """How each turn ends, as one number; [T]."""
    return TERMINATED * columns.terminated.long() + TRUNCATED * columns.truncated + BOOTSTRAP * columns.bootstrap


def exchange_turns(facts: TurnFacts, group: Group) -> tuple[Tensor, Tensor, ExchangeReport]:
    """V' and A' for each of this rank's turns (0 if nothing follows), both [T] float64 on the CPU.

    Raises:
        TurnTableError: the turns of all ranks do not form episodes; names segment and turn. Every rank raises it.
        OtherRankError: another rank called `report_failure`.
    """
    own = facts.stacked()
    table, start, report = all_turns(own, group)
    table = table.cpu()
    following = link_turns(table[:, 0], table[:, 1], table[:, 2].long())
    _, _, _, v, w, a, p, q = table.unbind(1)
    nothing = torch.zeros_like(v)
    next_value = gather_next(solve_chain(v, w, following), following, nothing)
    next_advantage = gather_next(solve_chain(a + p * next_value, q, following), following, nothing)
    mine = slice(start, start + len(own))
    return next_value[mine], next_advantage[mine], report


def report_failure(group: Group) -> None:
    """Tell the other ranks, which wait in `all_turns` or `relayed`, that this rank failed."""
    if group.size > 1:
        _gather_counts(-1, group, group.device_like(None))


@contextmanager
def relayed(group: Group) -> Generator[None]:
    """Run work that every rank of the group does; if it fails on one rank, it fails on all of them.

    There is one collective, at the end. Any collective inside the work needs its own relay of failures before it.

    Raises:
        OtherRankError: another rank failed. This rank's own failure is raised unchanged.
    """
    try:
        yield
    except Exception:
        report_failure(group)
        raise
    if group.size > 1:
        _check_counts(_gather_counts(0, group, group.device_like(None)))


def link_turns(segment: Tensor, index: Tensor, flags: Tensor) -> Tensor:
    """For each turn, the turn or bootstrap state that follows in its segment, or -1; all [T].

    Raises:
        TurnTableError: a segment is not a valid part of an episode; names it and the turn.
    """
    if not segment.numel():
        return segment.long()
    order = torch.argsort(index, stable=True)
    order = order[torch.argsort(segment[order], stable=True)]
    segment, index, flags = segment[order], index[order], flags[order]
    same = segment[1:] == segment[:-1]
    before, after = flags[:-1], flags[1:]
    turn_after = same & (after & BOOTSTRAP == 0)

    def refuse(wrong: Tensor, what: str) -> None:
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise TurnTableError(f"segment {int(segment[i])}, turn {int(index[i])}: {what}")

    refuse(same & (index[1:] == index[:-1]), "it is in the batch twice")
    refuse(same & (index[1:] != index[:-1] + 1), "the next turn is missing, but a later one is in the batch")
    refuse(same & (before & BOOTSTRAP > 0), "a bootstrap sample is followed by another sample of its segment")
    refuse(turn_after & (before & (TERMINATED | TRUNCATED) > 0), "it ended the episode, but another turn follows")
    last = torch.cat([~same, torch.ones(1, dtype=torch.bool)])
    refuse(
        last & (flags == 0),
        "it neither terminated nor truncated, but the batch has neither a next turn nor a bootstrap sample",
    )
    following = torch.full_like(order, -1)
    linked = (same & (before & TERMINATED == 0)).nonzero()[:, 0]
    following[order[linked]] = order[linked + 1]
    return following


def all_turns(own: Tensor, group: Group) -> tuple[Tensor, int, ExchangeReport]:
    """The rows [T, k] of all ranks in rank order, and the index of this rank's first row; two collectives.

    Raises:
        OtherRankError: another rank called `report_failure`.
    """
    if group.size == 1:
        return own, 0, ExchangeReport(len(own), 1, 0, 0)
    return gather_turns(own, group)


def gather_turns(own: Tensor, group: Group) -> tuple[Tensor, int, ExchangeReport]:
    """`all_turns` among several ranks; the collectives run even in a group of one."""
    device = group.device_like(own)
    counts = _gather_counts(len(own), group, device)
    _check_counts(counts)
    widest = max(counts)
    padded = torch.zeros(widest, own.shape[1], dtype=torch.float64, device=device)
    padded[: len(own)] = own
    parts = group.all_gather(padded) if widest else [padded] * group.size
    sent = 8 + padded.numel() * padded.element_size()
    report = ExchangeReport(sum(counts), group.size, sent, sent * (group.size - 1))
    table = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return table, sum(counts[: group.rank]), report


def _gather_counts(count: int, group: Group, device: torch.device) -> list[int]:
    mine = torch.tensor([count], dtype=torch.long, device=device)
    return [int(n) for n in torch.cat(group.all_gather(mine)).cpu()]


def _check_counts(counts: list[int]) -> None:
    if min(counts) < 0:
        raise OtherRankError(
            f"rank {counts.index(-1)} of {len(counts)} failed while computing advantages; its log has the cause"
        )
