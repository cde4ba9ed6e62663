"""slime's `--rollout-data-postprocess-path`: logs the KL to the reference policy for reasoning,
actions and notes.

A policy that games its reward often changes its actions first: their KL then grows several times as
fast as that of the reasoning.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from advantage.exchange import Layout, current_layout
from advantage.flags import advantage_flags
from advantage.packing import local_tokens, per_token, span_positions
from advantage.turn_table import TurnColumns, read_turn_table, to_list, whole_numbers


def log_kl_split(args: Any, rollout_id: int | None, rollout_data: MutableMapping[str, Any]) -> None:
    """Add `kl_reasoning`, `kl_action` and `kl_summary` to slime's metrics, and remove the turn
    table.

    Nothing is added where this process has no KL (other pipeline stages, no reference policy).

    Args:
        rollout_data: the actor's, after `compute_advantages`.

    Raises:
        TurnTableError: the table is missing or was written by another converter.
    """
    columns = read_turn_table(rollout_data, keep=False)
    layout = current_layout()
    kl = rollout_data.get("kl") if advantage_flags(args).kl_coef else None
    if kl is None:  # slime computes no KL for the reward
        kl = _differences(rollout_data.get("log_probs"), rollout_data.get("ref_log_probs"))
    if kl is None or not layout.last_stage:
        return
    for kind, mean in split_kl(columns, rollout_data, kl, layout).items():
        rollout_data[f"kl_{kind}"] = torch.tensor(mean)


def _differences(new: Sequence[Tensor] | None, old: Sequence[Tensor] | None) -> list[Tensor] | None:
    if new is None or old is None:
        return None
    return [a.float() - b.float() for a, b in zip(new, old, strict=True)]


def split_kl(
    columns: TurnColumns,
    rollout_data: MutableMapping[str, Any],
    kl: Sequence[Tensor],
    layout: Layout,
) -> dict[str, float]:
    """Average over the trained tokens of all ranks: nats per token of the reasoning, of actions,
    and of notes that were written in a separate turn (`summary`); kinds without a token are left out.

    `kl` has this rank's slice of each sample.
    """
    local = local_tokens(rollout_data, layout)
    nothing = kl[0].new_zeros(0) if kl else torch.zeros(0)
    mask = torch.cat([*rollout_data["loss_masks"], nothing]).bool()
    flat = torch.cat([*kl, nothing]).double()
    notes = per_token((~columns.moves).float(), columns, local.lengths, otherwise=0.0)
    notes = notes.bool().to(mask.device)
    acts = _action_tokens(columns, local.lengths).to(mask.device) & ~notes
    kinds = ~acts & ~notes, acts, notes
    parts = torch.stack([local.pick(mask & kind) for kind in kinds])
    kept = torch.where(parts, flat, 0.0)  # a masked token's KL may be NaN
    sums = torch.cat([kept.sum(1), parts.sum(1)])
    totals = to_list(layout.data_context.total(sums, like=flat))
    found = zip(("reasoning", "action", "summary"), totals[:3], totals[3:], strict=True)
    return {kind: total / tokens for kind, total, tokens in found if tokens}


def _action_tokens(columns: TurnColumns, lengths: Sequence[int]) -> Tensor:
    """Mark each turn's tokens from the action's first one on, [R] bool."""
    responses = whole_numbers(lengths)
    offsets = responses.cumsum(0) - responses
    starts = offsets[columns.sample] + columns.action_start
    sizes = columns.end - columns.action_start
    has_action = columns.action_start >= 0
    found = torch.zeros(sum(lengths), dtype=torch.bool)
    found[span_positions(starts[has_action], sizes[has_action])] = True
    return found
