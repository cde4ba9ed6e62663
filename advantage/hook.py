"""slime's `--custom-advantage-function-path`: computes advantages and returns from rollout data and the turn table.

slime calls it in the processes of the actor and of the critic, before whitening. It has four steps:

1. Pack the tokens of all turns end to end (`advantage/maths/packing.py`).
2. Scan: run GAE inside each turn, as if nothing followed it (`advantage/maths/forms.py`).
3. Exchange: find what follows each turn, on whichever rank it is (`advantage/megatron/exchange.py`).
4. Finish: add what follows, discounted, to every token, and set untrained tokens to 0.

The reward of each trained token is -kl_coef x KL. slime's critic has no log-probs, so its KL is 0, and KL never enters
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
from advantage.megatron.context_parallel import place_rows, response_spans, slice_rows
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
    """Write `advantages` and `returns` into `rollout_data`: one row per sample, shaped and typed like `values`.

    Rows are 0 on untrained tokens. On trained tokens, returns = advantages + values. The turn table is removed, unless
    a later hook still needs it.

    Args:
        args: slime's arguments; `advantage/settings.py` lists the ones that are read.
        rollout_data: `values` and `kl` (this context-parallel rank's slices, one row per sample), full `loss_masks`,
            `response_lengths`, `total_lengths`, and the turn table.

    Returns:
        The size of the exchange between data-parallel ranks; None on a pipeline stage without values.

    Raises:
        TurnTableError: the table is missing or was written by another converter, the turns of all ranks do not form
            episodes, or the loss masks do not show where turns begin.
        ConfigError: a setting is out of range.
        ValueError: a value, reward or KL is not finite, or a row has the wrong length.
        OtherRankError: another rank of this pipeline stage failed, so this rank stops too.
    """
    layout = current_layout()
    if not layout.last_stage:
        rollout_data.pop(TABLE_KEY, None)
        return None
    began = time.perf_counter()
    with relayed(layout.stage):
        turns, scan, carry, report = _exchange(args, rollout_data, layout)
        mask = torch.cat([*rollout_data["loss_masks"], carry.new_zeros(0)]).bool()
        advantages, returns = _finish(turns, scan, mask, carry)
        rollout_data["advantages"] = _rows_like_values(advantages, rollout_data, layout)
        rollout_data["returns"] = _rows_like_values(returns, rollout_data, layout)
    watch_warmup(args, rollout_data, turns.values, returns, mask, layout.data)
    logger.info(
        "advantages of %d turns over %d data-parallel ranks in %.1f ms, %d bytes sent, %d received",
        *(report.turns, report.ranks, 1e3 * (time.perf_counter() - began), report.bytes_sent, report.bytes_received),
    )
    return report


@dataclass(frozen=True)
class LocalTurns:
    """This rank's turns, with the R response tokens of its samples laid end to end."""

    packed: PackedTurns
    values: Tensor
    """[R] float64; complete after an all-reduce over context-parallel ranks."""
    kl: Tensor | None
    """[R], likewise; None if kl_coef is 0."""


def _exchange(
    args: Any, rollout_data: MutableMapping[str, Any], layout: Layout
) -> tuple[LocalTurns, TurnScan, Tensor, ExchangeReport]:
    """Pack, scan and exchange. Returns this rank's turns, their scan, and what reaches each turn's last token, [T]."""
    try:
        with relayed(layout.context):
            settings, flags = advantage_settings(args), advantage_flags(args)
            discounts = settings.discounts
            rows = read_turn_table(rollout_data, keep=flags.turn_table_is_read_again)
            turns = _pack(settings, flags, rollout_data, rows, layout)
        layout.context.all_reduce(turns.values)
        if turns.kl is not None:
            layout.context.all_reduce(turns.kl)
        scan = _scan(settings, flags, turns)
        facts = _turn_facts(turns, scan, rows, discounts)
    except Exception:
        report_failure(layout.data)
        raise
    next_value, next_advantage, report = exchange_turns(facts, layout.data)
    carry = discounts.gamma_step * next_value + discounts.step_decay * next_advantage
    return turns, scan, carry.to(turns.values.device), report


def _pack(
    settings: AdvantageSettings,
    flags: AdvantageFlags,
    rollout_data: Mapping[str, Any],
    rows: Sequence[TurnRow],
    layout: Layout,
) -> LocalTurns:
    """Check this rank's samples and pack them."""
    if rollout_data.get("values") is None:
        raise TurnTableError("rollout_data has no values, and GAE needs a critic: give --advantage-estimator ppo")
    lengths = rollout_data["response_lengths"]
    spans = response_spans(rollout_data, layout)
    values = place_rows(rollout_data["values"], spans, lengths, layout.context).double()
    kl = place_rows(rollout_data["kl"], spans, lengths, layout.context) if flags.kl_coef else None
    packed = pack_turns(rows, rollout_data["loss_masks"], lengths)
    if settings.value_first_token_weight != 1.0:
        check_first_tokens(packed, rollout_data["loss_masks"])
    return LocalTurns(packed, values, kl)


def _scan(settings: AdvantageSettings, flags: AdvantageFlags, turns: LocalTurns) -> TurnScan:
    """Run the configured GAE inside every turn."""
    packed = turns.packed
    values = turns.values[packed.positions]
    rewards = torch.zeros_like(values)
    if turns.kl is not None:
        rewards -= flags.kl_coef * turns.kl.double()[packed.positions] * packed.trained
    return FORMS[settings.gae_form](values, rewards, packed, settings.discounts)


def _turn_facts(turns: LocalTurns, scan: TurnScan, rows: Sequence[TurnRow], d: Discounts) -> TurnFacts:
    """How each turn or bootstrap state depends on what follows it, as `advantage/megatron/exchange.py` defines it."""
    packed, values = turns.packed, turns.values
    entries = [(row, k) for row in rows for k in range(max(len(row.turns), 1))]
    labels = torch.tensor(
        [(row.segment, row.first_turn + k, turn_flags(row, k)) for row, k in entries],
        dtype=torch.float64,
        device=values.device,
    ).reshape(-1, 3)
    has_state, nonempty = packed.states >= 0, packed.lengths > 0
    state_value = values[packed.states.clamp(min=0)] if len(values) else packed.rewards
    # An empty turn (no state) passes on everything that follows it. A bootstrap state (no tokens) passes on nothing.
    decay = torch.where(nonempty, scan.entry_decay, (~has_state).double())
    return TurnFacts(
        *labels.unbind(1),
        v=torch.where(nonempty, scan.entry_value, torch.where(has_state, state_value, packed.rewards)),
        w=d.gamma_step * (~has_state).double(),
        a=torch.where(nonempty, scan.entry_advantage, 0.0),
        p=d.gamma_step * decay * has_state,
        q=d.step_decay * decay,
    )


def _finish(turns: LocalTurns, scan: TurnScan, mask: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R], 0 on masked tokens; `carry` [T] is what reaches each turn's last token."""
    positions = turns.packed.positions
    tokens = scan.advantages + scan.decay * carry[token_turns(turns.packed.lengths)]
    advantages, returns = (tokens.new_zeros(len(mask)) for _ in range(2))
    advantages[positions], returns[positions] = tokens, tokens + scan.baseline
    return advantages * mask, returns * mask


def _rows_like_values(flat: Tensor, rollout_data: MutableMapping[str, Any], layout: Layout) -> list[Tensor]:
    """Split `flat` [R] into one row per sample: this rank's slice, in the dtype of its values."""
    lengths = rollout_data["response_lengths"]
    if not lengths:
        return []
    rows = slice_rows(torch.split(flat, lengths), response_spans(rollout_data, layout))
    return [row.to(values.dtype) for row, values in zip(rows, rollout_data["values"], strict=True)]
