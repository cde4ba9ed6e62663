"""slime's `--custom-advantage-function-path`: from rollout data and the turn table to advantages and returns.

slime calls it in the actor's and in the critic's processes, on the last pipeline stage, before whitening. Four steps:

1. Pack: lay the tokens of all turns end to end (`advantage/maths/packing.py`).
2. Scan: run GAE inside every turn as if nothing followed it (`advantage/maths/forms.py`).
3. Exchange: learn what follows each turn, wherever that turn is (`advantage/megatron/exchange.py`).
4. Finish: add what follows, discounted, to every token; set untrained tokens to 0.

KL enters as -kl_coef x KL on trained tokens. slime's critic has no log-probs, so its KL is zero and KL never reaches
the value targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.convergence import watch_warmup
from advantage.errors import TurnTableError
from advantage.maths.dual_gae import Discounts
from advantage.maths.forms import FORMS, TurnScan, token_turns
from advantage.maths.packing import PackedTurns, pack_turns
from advantage.megatron.context_parallel import add_up, place_rows, response_spans, slice_rows
from advantage.megatron.exchange import (
    ExchangeReport,
    TurnFacts,
    exchange_turns,
    relayed,
    report_failure,
    turn_flags,
)
from advantage.megatron.layout import Layout, current_layout
from advantage.settings import AdvantageFlags, AdvantageSettings, advantage_flags, advantage_settings
from advantage.turn_table import TABLE_KEY, TurnRow, read_turn_table
from advantage.value_weight import check_first_tokens

logger = logging.getLogger(__name__)


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> ExchangeReport | None:
    """Write `advantages` and `returns` into `rollout_data`: one row per sample, like `values` in shape and dtype.

    Rows are 0 on untrained tokens; elsewhere returns = advantages + values. The turn table is removed, unless a later
    hook still reads it.

    Args:
        args: slime's; see `advantage/settings.py` for what is read.
        rollout_data: `values` and `kl` (this context-parallel rank's slices, one row per sample), full `loss_masks`,
            `response_lengths`, `total_lengths`, and the turn table.

    Returns:
        What crossed the data-parallel group; None on a pipeline stage without values.

    Raises:
        TurnTableError: the table is missing or not ours, the turns of all ranks do not form episodes, or first tokens
            cannot be told apart.
        ConfigError: a setting is out of range.
        ValueError: a value, reward or KL is not finite, or a row has the wrong length.
        OtherRankError: another rank of this pipeline stage failed; no rank is left waiting.
    """
    layout = current_layout()
    if not layout.last_stage:
        rollout_data.pop(TABLE_KEY, None)
        return None
    began = time.perf_counter()
    with relayed(layout.stage):
        turns, carry, report = _exchange(args, rollout_data, layout)
        mask = torch.cat([*rollout_data["loss_masks"], carry.new_zeros(0)]).bool()
        advantages, returns = _finish(turns, mask, carry)
        rollout_data["advantages"] = _rows_like_values(advantages, rollout_data, layout)
        rollout_data["returns"] = _rows_like_values(returns, rollout_data, layout)
    watch_warmup(args, rollout_data, turns.values, returns, mask, layout.data)
    logger.info(
        "advantages of %d turns over %d data-parallel ranks in %.1f ms, %d bytes sent, %d received",
        *(report.turns, report.ranks, 1e3 * (time.perf_counter() - began), report.bytes_sent, report.bytes_received),
    )
    return report


@dataclass(frozen=True)
class LocalRows:
    """This rank's samples before anything crosses ranks; R response tokens laid end to end."""

    packed: PackedTurns
    values: Tensor
    """[R]; 0 where another context-parallel rank has the entry."""
    kl: Tensor | None
    """[R] likewise; None where KL is not charged."""


@dataclass(frozen=True)
class LocalTurns:
    """This rank's T turns and states, each summed up as far as one rank can."""

    packed: PackedTurns
    values: Tensor
    """[R] float64."""
    scan: TurnScan


def _exchange(
    args: Any, rollout_data: MutableMapping[str, Any], layout: Layout
) -> tuple[LocalTurns, Tensor, ExchangeReport]:
    """This rank's turns, and what reaches each turn's last token from the turns after it, [T]."""
    try:
        with relayed(layout.context):
            settings, flags = advantage_settings(args), advantage_flags(args)
            discounts = settings.discounts
            rows = read_turn_table(rollout_data, keep=flags.turn_table_is_read_again)
            own = _pack(settings, flags, rollout_data, rows, layout)
        for placed in (own.values, own.kl):
            if placed is not None:
                add_up(placed, layout.context)
        turns = _scan(settings, flags, own)
        facts = _turn_facts(turns, rows, discounts)
    except Exception:
        report_failure(layout.data)
        raise
    v_next, a_next, report = exchange_turns(facts, layout.data)
    carry = discounts.gamma_step * v_next + discounts.step_decay * a_next
    return turns, carry.to(turns.values.device), report


def _pack(
    settings: AdvantageSettings,
    flags: AdvantageFlags,
    rollout_data: Mapping[str, Any],
    rows: Sequence[TurnRow],
    layout: Layout,
) -> LocalRows:
    """Check this rank's samples and lay them end to end."""
    if rollout_data.get("values") is None:
        raise TurnTableError("rollout_data has no values; GAE needs a critic: give --advantage-estimator ppo")
    lengths = rollout_data["response_lengths"]
    spans = response_spans(rollout_data, layout)
    values = place_rows(rollout_data["values"], spans, lengths, layout.context)
    kl = place_rows(rollout_data["kl"], spans, lengths, layout.context) if flags.kl_coef else None
    packed = pack_turns(rows, rollout_data["loss_masks"], lengths)
    if settings.value_first_token_weight != 1.0:
        check_first_tokens(packed, rollout_data["loss_masks"])
    return LocalRows(packed, values, kl)


def _scan(settings: AdvantageSettings, flags: AdvantageFlags, own: LocalRows) -> LocalTurns:
    """Run the configured GAE inside every turn."""
    packed, values = own.packed, own.values.double()
    token_values = values[packed.places]
    rewards = torch.zeros_like(token_values)
    if own.kl is not None:
        rewards -= flags.kl_coef * own.kl.double()[packed.places] * packed.trained
    scan = FORMS[settings.gae_form](token_values, rewards, packed, settings.discounts)
    return LocalTurns(packed, values, scan)


def _turn_facts(turns: LocalTurns, rows: Sequence[TurnRow], d: Discounts) -> TurnFacts:
    """How each turn or bootstrap state depends on what follows it; see `advantage/megatron/exchange.py`."""
    packed, scan = turns.packed, turns.scan
    entries = [(row, k) for row in rows for k in range(max(len(row.turns), 1))]
    column = lambda x: torch.tensor(x, dtype=torch.float64, device=turns.values.device)
    has_state, nonempty = packed.states >= 0, packed.lengths > 0
    state_value = turns.values[packed.states.clamp(min=0)] if len(turns.values) else packed.rewards
    # An empty turn (no state) passes on everything that follows it; a bootstrap state (no tokens) passes on nothing.
    reach = torch.where(nonempty, scan.a_reach, (~has_state).double())
    return TurnFacts(
        segment=column([row.segment for row, _ in entries]),
        index=column([row.first_turn + k for row, k in entries]),
        flags=column([turn_flags(row, k) for row, k in entries]),
        v=torch.where(nonempty, scan.v, torch.where(has_state, state_value, packed.rewards)),
        w=d.gamma_step * (~has_state).double(),
        a=torch.where(nonempty, scan.a, 0.0),
        p=d.gamma_step * reach * has_state,
        q=d.step_decay * reach,
    )


def _finish(turns: LocalTurns, mask: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R], 0 where the loss mask [R] is; `carry` [T] reaches each turn's last token."""
    scan, places = turns.scan, turns.packed.places
    tokens = scan.alone + scan.reach * carry[token_turns(turns.packed.lengths)]
    advantages, returns = torch.zeros_like(turns.values), torch.zeros_like(turns.values)
    advantages[places], returns[places] = tokens, tokens + scan.baseline
    return advantages * mask, returns * mask


def _rows_like_values(flat: Tensor, rollout_data: MutableMapping[str, Any], layout: Layout) -> list[Tensor]:
    """One row per sample: this rank's slice of it, in the dtype of its values."""
    lengths = rollout_data["response_lengths"]
    if not lengths:
        return []
    rows = slice_rows(flat.split(lengths), response_spans(rollout_data, layout))
    return [row.to(values.dtype) for row, values in zip(rows, rollout_data["values"], strict=True)]
