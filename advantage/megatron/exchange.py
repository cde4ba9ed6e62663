"""Turns of one episode may lie on any data-parallel rank in any order; this makes every rank see the whole chain.

What a turn does to those before it is affine in what follows it: V = v + w V', A = a + p V' + q A', where V' and A'
belong to the next turn's first token. So eight numbers a turn cross the data-parallel group, in two collectives (how
many turns, then the turns), whatever the number of tokens; every rank then solves the whole chain for itself.

A rank that fails must not leave the others waiting in a collective: `relayed` makes a failure on one rank a failure on
every rank of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.errors import OtherRankError, TurnTableError
from advantage.maths.dual_gae import gather_next, solve_chain
from advantage.megatron.layout import Group
from advantage.turn_table import TurnKind, TurnRow

TERMINATED, TRUNCATED, BOOTSTRAP = 1, 2, 4


@dataclass(frozen=True)
class TurnFacts:
    """One entry a turn (or bootstrap state), all [T] float64; see this module's first lines for v, w, a, p, q."""

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
    """What one exchange cost."""

    turns: int
    """Turns and bootstrap states of all ranks."""
    ranks: int
    bytes_sent: int
    """By this rank."""
    bytes_received: int
    """By this rank, from the others."""


def turn_flags(row: TurnRow, k: int) -> int:
    """How turn k of a sample ends, as one number; terminated and truncated describe the sample's last turn."""
    last = k == len(row.turns) - 1
    bootstrap = row.kind is TurnKind.BOOTSTRAP
    return TERMINATED * (row.terminated and last) + TRUNCATED * (row.truncated and last) + BOOTSTRAP * bootstrap


def exchange_turns(facts: TurnFacts, group: Group) -> tuple[Tensor, Tensor, ExchangeReport]:
    """V and A of what follows each of this rank's turns (0 where nothing does), both [T] float64 on the CPU.

    Raises:
        TurnTableError: the turns of all ranks together make no proper episodes (names segment and turn); every rank
            raises.
        OtherRankError: another rank called `report_failure`.
    """
    own = facts.stacked()
    table, start, report = all_turns(own, group)
    table = table.cpu()
    following = link_turns(table[:, 0], table[:, 1], table[:, 2].long())
    _, _, _, v, w, a, p, q = table.unbind(1)
    nothing = torch.zeros_like(v)
    v_next = gather_next(solve_chain(v, w, following), following, nothing)
    a_next = gather_next(solve_chain(a + p * v_next, q, following), following, nothing)
    mine = slice(start, start + len(own))
    return v_next[mine], a_next[mine], report


def report_failure(group: Group) -> None:
    """Tell the other ranks, waiting in `all_turns`, that this one has nothing to give them."""
    if group.size > 1:
        _gather_counts(-1, group, group.device_like(None))


@contextmanager
def relayed(group: Group) -> Iterator[None]:
    """Run this rank's share of work that every rank of the group does; if it fails on one, it fails on all.

    One collective, at the end. The work itself may contain collectives only where a failure before them is relayed too.

    Raises:
        OtherRankError: the share of another rank failed. This rank's own failure is raised unchanged.
    """
    try:
        yield
    except Exception:
        report_failure(group)
        raise
    if group.size > 1:
        _check_counts(_gather_counts(0, group, group.device_like(None)))


def link_turns(segment: Tensor, index: Tensor, flags: Tensor) -> Tensor:
    """For each turn the turn that follows in its segment, -1 where value ends; all [T].

    Raises:
        TurnTableError: names the first segment that is no proper part of an episode.
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
    refuse(same & (index[1:] != index[:-1] + 1), "the turn after it is missing, though a later one is in the batch")
    refuse(same & (before & BOOTSTRAP > 0), "a bootstrap sample is followed by another sample of its segment")
    refuse(turn_after & (before & (TERMINATED | TRUNCATED) > 0), "it ended the episode, yet a turn follows it")
    last = torch.cat([~same, torch.ones(1, dtype=torch.bool)])
    refuse(
        last & (flags == 0),
        "it neither terminated nor truncated, yet neither a next turn nor a bootstrap sample is in the batch",
    )
    following = torch.full_like(order, -1)
    linked = (same & (before & TERMINATED == 0)).nonzero()[:, 0]
    following[order[linked]] = order[linked + 1]
    return following


def all_turns(own: Tensor, group: Group) -> tuple[Tensor, int, ExchangeReport]:
    """The rows [T, k] of all ranks, rank after rank, and where this rank's start; two collectives.

    Raises:
        OtherRankError: another rank called `report_failure`.
    """
    if group.size == 1:
        return own, 0, ExchangeReport(len(own), 1, 0, 0)
    return gather_turns(own, group)


def gather_turns(own: Tensor, group: Group) -> tuple[Tensor, int, ExchangeReport]:
    """What `all_turns` does among several ranks; with a group of one the collectives run all the same."""
    device = group.device_like(own)
    counts = _gather_counts(len(own), group, device)
    _check_counts(counts)
    widest = max(counts)
    padded = torch.zeros(widest, own.shape[1], dtype=torch.float64, device=device)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(group.size)]
    if widest:
        dist.all_gather(parts, padded, group=group.handle)
    sent = 8 + padded.numel() * padded.element_size()
    report = ExchangeReport(sum(counts), group.size, sent, sent * (group.size - 1))
    table = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return table, sum(counts[: group.rank]), report


def _gather_counts(count: int, group: Group, device: torch.device) -> list[int]:
    mine = torch.tensor([count], dtype=torch.long, device=device)
    counts = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(counts, mine, group=group.handle)
    return torch.cat(counts).tolist()


def _check_counts(counts: list[int]) -> None:
    if min(counts) < 0:
        raise OtherRankError(
            f"rank {counts.index(-1)} of {len(counts)} failed while it computed advantages; its log has the cause"
        )
