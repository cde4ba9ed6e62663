"""slime's `--custom-advantage-function-path`: from its rollout data and the turn table to advantages and returns.

Called in the actor's and the critic's processes, on the last pipeline stage, before whitening. KL enters as
-kl_coef x KL on trained tokens only; in slime the critic has no log-probs, so its KL is zero and KL never reaches
the value targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from advantage.convergence import watch_warmup
from advantage.local import LocalTurns, finish, prepare, read_rows, turn_facts
from advantage.maths.dual_gae import Discounts
from advantage.megatron.context_parallel import response_spans, slice_rows
from advantage.megatron.exchange import ExchangeReport, exchange_turns, relayed, report_failure
from advantage.megatron.layout import Layout, current_layout
from advantage.turn_table import TABLE_KEY, TurnRow, decode_rows, pop_turn_table

logger = logging.getLogger(__name__)

KL_SPLIT = "advantage.kl_split.log_kl_split"
"""The `--rollout-data-postprocess-path` hook that still needs the turn table, and takes it out itself."""


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> ExchangeReport | None:
    """Write `advantages` and `returns` into `rollout_data`, one row a sample, like `values` in shape and dtype.

    Rows are 0 on untrained tokens; elsewhere returns = advantages + values. The turn table is taken out.

    Args:
        args: slime's, with `gamma_step`, `lambda_step`, `gamma_token`, `lambda_token` of the custom YAML, `kl_coef`.
        rollout_data: `values` and `kl` (this context-parallel rank's slices, one row a sample), full `loss_masks`,
            `response_lengths`, `total_lengths`, and the turn table.

    Returns:
        What crossed the data-parallel group; None on a pipeline stage without values.

    Raises:
        TurnTableError: the table is missing or foreign, or the turns of all ranks make no proper episodes, or their
            first tokens cannot be weighed.
        ValueError: a value, reward or KL is not finite, or a row has the wrong length.
        OtherRankError: another rank of this pipeline stage failed, for whatever reason; no rank is left waiting.
    """
    layout = current_layout()
    if not layout.last_stage:
        rollout_data.pop(TABLE_KEY, None)
        return None
    began = time.perf_counter()
    with relayed(layout.stage):
        local, carry, report = _exchange(args, rollout_data, layout)
        masks = [*rollout_data["loss_masks"], carry.new_zeros(0)]
        mask = torch.cat(masks).bool()
        advantages, returns = finish(local, mask, carry)
        rollout_data["advantages"] = _rows_like_values(advantages, rollout_data, layout)
        rollout_data["returns"] = _rows_like_values(returns, rollout_data, layout)
    watch_warmup(args, rollout_data, local.values, returns, mask, layout.data)
    logger.info(
        "advantages of %d turns over %d data-parallel ranks in %.1f ms, %d bytes sent, %d received",
        *(report.turns, report.ranks, 1e3 * (time.perf_counter() - began), report.bytes_sent, report.bytes_received),
    )
    return report


def _exchange(
    args: Any, rollout_data: MutableMapping[str, Any], layout: Layout
) -> tuple[LocalTurns, Tensor, ExchangeReport]:
    """This rank's turns, and what reaches each turn's last token from the turns that follow it, [T]."""
    try:
        with relayed(layout.context):
            discounts = Discounts.from_args(args)
            rows = _read_table(args, rollout_data)
            own = read_rows(args, rollout_data, rows, layout)
        own.gather(layout.context)
        local = prepare(args, own, discounts)
        facts = turn_facts(local, rows, discounts)
    except Exception:
        report_failure(layout.data)
        raise
    v_next, a_next, report = exchange_turns(facts, layout.data)
    carry = (discounts.gamma_step * v_next + discounts.step_decay * a_next).to(local.values.device)
    return local, carry, report


def _read_table(args: Any, rollout_data: MutableMapping[str, Any]) -> list[TurnRow]:
    if getattr(args, "rollout_data_postprocess_path", None) == KL_SPLIT and TABLE_KEY in rollout_data:
        return decode_rows(rollout_data[TABLE_KEY], rollout_data["response_lengths"])
    return pop_turn_table(rollout_data)


def _rows_like_values(flat: Tensor, rollout_data: MutableMapping[str, Any], layout: Layout) -> list[Tensor]:
    """One row a sample, this rank's slice of it, in the dtype of its values."""
    lengths = rollout_data["response_lengths"]
    rows = flat.split(lengths) if lengths else []
    rows = slice_rows(rows, response_spans(rollout_data, layout)) if rows else []
    return [row.to(values.dtype) for row, values in zip(rows, rollout_data["values"], strict=True)]
