"""One rank's turns, with everything already summed that other ranks cannot change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.maths.dual_gae import Discounts
from advantage.maths.forms import FORMS, TurnScan, token_turns
from advantage.maths.packing import PackedTurns, pack_turns
from advantage.megatron.context_parallel import add_up, place_rows, response_spans
from advantage.megatron.exchange import TurnFacts, flags_of
from advantage.megatron.layout import Group, Layout
from advantage.turn_table import TurnRow
from advantage.value_weight import check_first_tokens


@dataclass(frozen=True)
class LocalTurns:
    """R response tokens of this rank's samples laid end to end; N of them belong to the T turns and states."""

    packed: PackedTurns
    values: Tensor
    """[R] float64."""
    scan: TurnScan


@dataclass(frozen=True)
class OwnRows:
    """This rank's samples, as far as they are known without other ranks."""

    packed: PackedTurns
    values: Tensor
    """[R]; this rank's slices in their places, 0 where another context-parallel rank has the entry."""
    kl: Tensor | None
    """The same of the KL; None where it is not charged."""

    def gather(self, context: Group) -> None:
        """Fill in the other ranks' entries: collectives and nothing else, so that nothing else can fail between."""
        for full in (self.values, self.kl):
            if full is not None:
                add_up(full, context)


def read_rows(args: Any, rollout_data: Mapping[str, Any], rows: Sequence[TurnRow], layout: Layout) -> OwnRows:
    """Check and lay out what this rank has; nothing crosses ranks.

    Raises:
        TurnTableError: the table does not fit the samples, first tokens cannot be told apart, or there are no values.
        ValueError: a row has the wrong length, or `gae_form` is unknown.
    """
    form = getattr(args, "gae_form", "dual")
    if form not in FORMS:
        raise ValueError(f"gae_form must be one of {', '.join(FORMS)}, got {form!r}")
    if rollout_data.get("values") is None:
        raise TurnTableError("rollout_data has no values; GAE needs a critic: give --advantage-estimator ppo")
    lengths = rollout_data["response_lengths"]
    spans = response_spans(rollout_data, layout)
    place = lambda key: place_rows(rollout_data[key], spans, lengths, layout.context)
    values, kl = place("values"), place("kl") if getattr(args, "kl_coef", 0.0) else None
    packed = pack_turns(rows, rollout_data["loss_masks"], lengths)
    if getattr(args, "value_first_token_weight", 1.0) != 1.0:
        check_first_tokens(packed, rollout_data["loss_masks"])
    return OwnRows(packed, values, kl)


def prepare(args: Any, own: OwnRows, d: Discounts) -> LocalTurns:
    """Run the recursion inside every turn; `own` has been gathered.

    Raises:
        ValueError: a value, reward or KL is not finite.
    """
    packed, values = own.packed, own.values.double()
    token_values = values[packed.places]
    rewards = torch.zeros_like(token_values)
    if own.kl is not None:
        rewards -= args.kl_coef * own.kl.double()[packed.places] * packed.trained
    scan = FORMS[getattr(args, "gae_form", "dual")]
    return LocalTurns(packed, values, scan(token_values, rewards, packed, d))


def turn_facts(local: LocalTurns, rows: Sequence[TurnRow], d: Discounts) -> TurnFacts:
    """How each turn or bootstrap state depends on what follows it; see `advantage/megatron/exchange.py`."""
    packed, scan = local.packed, local.scan
    entries = [(row, k) for row in rows for k in range(max(len(row.turns), 1))]
    column = lambda x: torch.tensor(x, dtype=torch.float64, device=local.values.device)
    stands, filled = packed.states >= 0, packed.lengths > 0
    lent = local.values[packed.states.clamp(min=0)] if len(local.values) else packed.rewards
    # An empty turn (no state of its own) hands on all that follows; a bootstrap state (not filled) hands on nothing.
    reach = torch.where(filled, scan.a_reach, (~stands).double())
    return TurnFacts(
        segment=column([row.segment for row, _ in entries]),
        index=column([row.first_turn + k for row, k in entries]),
        flags=column([_flags(row, k) for row, k in entries]),
        v=torch.where(filled, scan.v, torch.where(stands, lent, packed.rewards)),
        w=d.gamma_step * (~stands).double(),
        a=torch.where(filled, scan.a, 0.0),
        p=d.gamma_step * reach * stands,
        q=d.step_decay * reach,
    )


def finish(local: LocalTurns, mask: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R], 0 where the loss mask [R] is; `carry` [T] reaches each turn's last token."""
    scan, places = local.scan, local.packed.places
    tokens = scan.alone + scan.reach * carry[token_turns(local.packed.lengths)]
    advantages, returns = torch.zeros_like(local.values), torch.zeros_like(local.values)
    advantages[places], returns[places] = tokens, tokens + scan.baseline
    return advantages * mask, returns * mask


def _flags(row: TurnRow, k: int) -> int:
    last = k == len(row.turns) - 1
    return flags_of(row.kind, row.terminated and last, row.truncated and last)
