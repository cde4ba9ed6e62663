"""slime's `--custom-advantage-function-path`: computes advantages and returns from rollout data and the turn table.

slime calls it in the processes of the actor and of the critic, before whitening. It has four steps:

1. Pack the tokens of all turns end to end (`advantage/packing.py`).
2. Scan: run GAE inside each turn, as if nothing followed it (`advantage/maths/forms.py`).
3. Exchange: find what follows each turn, on whichever rank it is (`advantage/exchange.py`).
4. Finish: add what follows, discounted, to every token, and set untrained tokens to 0.

The reward of each trained token is -kl_coef x KL. slime's critic has no log-probs, so its KL is 0, and KL never enters
the value targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.alarms import watch_warmup
from advantage.errors import TurnTableError
from advantage.exchange import (
    ExchangeReport,
    TurnFacts,
    exchange_turns,
    relayed,
    report_failure,
    turn_flags,
)
from advantage.gae import Discounts
from advantage.maths.adaptive import scan_turns_by_decay
from advantage.maths.checks import check_tokens
from advantage.maths.forms import FORMS
from advantage.megatron.context_parallel import LocalTokens, local_tokens
from advantage.packing import PackedTurns, pack_turns, per_token
from advantage.policy_loss import STALENESS
from advantage.pretraining import progress_of
from advantage.ranks import Layout, current_layout
from advantage.scan import TokenRewards, TurnScan
from advantage.settings import AdvantageFlags, AdvantageSettings, advantage_flags, advantage_settings
from advantage.turn_table import TABLE_KEY, TurnColumns, read_turn_table
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

    With `policy_loss: dis`, the actor's data also gets the staleness of each token, for the loss's metrics.

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
        turns, columns, scan, carry, report = _exchange(args, rollout_data, layout)
        advantages, returns = _finish(turns, scan, carry)
        rollout_data["advantages"] = turns.local.split(advantages)
        rollout_data["returns"] = turns.local.split(returns)
    result = (turns.values, returns, turns.packed.runs.mask, layout.data)
    if advantage_settings(args).value_pretraining.batches:
        progress_of.of(args).measure(columns, turns.local.lengths, *result)
    else:
        watch_warmup(args, rollout_data, *result)
    logger.info(
        "advantages of %d turns over %d data-parallel ranks in %.1f ms, %d bytes sent, %d received",
        *(report.turns, report.ranks, 1e3 * (time.perf_counter() - began), report.bytes_sent, report.bytes_received),
    )
    return report


@dataclass(frozen=True)
class LocalTurns:
    """This rank's turns, with the R response tokens of its samples laid end to end."""

    local: LocalTokens
    packed: PackedTurns
    values: Tensor
    """[R]; complete after an all-reduce over context-parallel ranks."""
    kl: Tensor | None
    """[R], likewise; None if kl_coef is 0."""


def _exchange(
    args: Any, rollout_data: MutableMapping[str, Any], layout: Layout
) -> tuple[LocalTurns, TurnColumns, TurnScan, Tensor, ExchangeReport]:
    """Pack, scan and exchange.

    Returns this rank's turns, their table, their scan, and what reaches each turn's last token, [T].
    """
    try:
        with relayed(layout.context):
            settings, flags = advantage_settings(args), advantage_flags(args)
            discounts = settings.discounts_of(flags.slime_verlog_role)
            keep = flags.turn_table_is_read_again or settings.value_pretraining.batches > 0
            columns = read_turn_table(rollout_data, keep=keep)
            turns = _pack(settings, flags, rollout_data, columns, layout)
            if settings.policy_loss == "dis" and flags.slime_verlog_role == "actor":
                stale = per_token(columns.staleness, columns, turns.local.lengths, otherwise=-1.0)
                rollout_data[STALENESS] = turns.local.split(stale.to(turns.values.device))
        layout.context.all_reduce(turns.values)
        if turns.kl is not None:
            layout.context.all_reduce(turns.kl)
        scan = _scan(settings, flags, turns, discounts)
        facts = _turn_facts(turns, scan, columns, discounts)
    except Exception:
        report_failure(layout.data)
        raise
    next_value, next_advantage, report = exchange_turns(facts, layout.data)
    carry = discounts.gamma_step * next_value + discounts.step_decay * next_advantage
    return turns, columns, scan, carry.to(turns.values.device), report


def _pack(
    settings: AdvantageSettings,
    flags: AdvantageFlags,
    rollout_data: Mapping[str, Any],
    columns: TurnColumns,
    layout: Layout,
) -> LocalTurns:
    """Check this rank's samples and pack them."""
    if rollout_data.get("values") is None:
        raise TurnTableError("rollout_data has no values, and GAE needs a critic: give --advantage-estimator ppo")
    local = local_tokens(rollout_data, layout)
    values = local.join(rollout_data["values"])
    kl = local.join(rollout_data["kl"]) if flags.kl_coef else None
    packed = pack_turns(columns, rollout_data["loss_masks"], local.lengths)
    if settings.value_first_token_weight != 1.0:
        check_first_tokens(packed, local.lengths)
    return LocalTurns(local, packed, values, kl)


def _scan(settings: AdvantageSettings, flags: AdvantageFlags, turns: LocalTurns, d: Discounts) -> TurnScan:
    """Run the configured GAE inside every turn."""
    packed = turns.packed
    values = packed.take(turns.values)
    rewards = None
    if turns.kl is not None:
        kl = packed.take(turns.kl).index_fill_(0, packed.untrained, 0)
        rewards = TokenRewards(kl, -flags.kl_coef)
    check_tokens(values, values if rewards is None else rewards.raw)
    lambdas = settings.token_lambdas(flags.slime_verlog_role, packed.lengths)
    if lambdas is not None:
        return scan_turns_by_decay(values, rewards, packed.lengths, packed.rewards, d.gamma_token, lambdas)
    return FORMS[settings.gae_form](values, rewards, packed.lengths, packed.rewards, d)


def _turn_facts(turns: LocalTurns, scan: TurnScan, columns: TurnColumns, d: Discounts) -> TurnFacts:
    """How each turn or bootstrap state depends on what follows it, as `advantage/exchange.py` defines it."""
    packed = turns.packed
    labels = torch.stack([columns.segment, columns.index, turn_flags(columns).double()]).to(packed.rewards.device)
    empty = packed.lengths == 0
    # An empty turn passes on everything that follows it, a bootstrap state nothing.
    decay = torch.where(empty, 1.0, scan.entry_decay) * ~packed.bootstrap
    return TurnFacts(
        *labels,
        v=torch.where(empty, packed.rewards, scan.entry_value),
        w=d.gamma_step * empty.double(),
        a=torch.where(empty | packed.bootstrap, 0.0, scan.entry_advantage),
        p=d.gamma_step * decay * ~empty,
        q=d.step_decay * decay,
    )


def _finish(turns: LocalTurns, scan: TurnScan, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R], 0 on masked tokens; `carry` [T] is what reaches each turn's last token."""
    untrained = turns.packed.untrained
    advantages, returns = (turns.packed.put(x.index_fill_(0, untrained, 0)) for x in scan.finish(carry))
    return advantages, returns
