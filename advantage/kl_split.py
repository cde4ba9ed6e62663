"""slime's `--rollout-data-postprocess-path`: logs the KL to the reference policy for reasoning, actions and notes.

A policy that games its reward often changes its actions first: their KL then grows several times as fast as that of
the reasoning.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.exchange import Layout, current_layout
from advantage.flags import advantage_flags
from advantage.packing import local_tokens, per_token, span_positions
from advantage.turn_table import TurnColumns, read_turn_table, whole_numbers


@dataclass(frozen=True)
class KlSplit:
    """Mean KL per token over all ranks, in nats; None without such tokens."""

    reasoning: float | None
    action: float | None
    reasoning_tokens: int
    action_tokens: int
    summary: float | None = None
    """Of notes that were written in a separate turn; they count as neither reasoning nor action."""
    summary_tokens: int = 0


def log_kl_split(args: Any, rollout_id: int | None, rollout_data: MutableMapping[str, Any]) -> KlSplit | None:
    """Add `kl_reasoning`, `kl_action` and `kl_summary` to slime's metrics, and remove the turn table.

    Args:
        rollout_data: the actor's, after `compute_advantages`.

    Returns:
        The split; None if this process has no KL (other pipeline stages, no reference policy).

    Raises:
        TurnTableError: the table is missing or was written by another converter.
    """
    columns, layout = read_turn_table(rollout_data, keep=False), current_layout()
    kl = rollout_data.get("kl") if advantage_flags(args).kl_coef else None
    if kl is None:  # slime computes no KL for the reward
        new, old = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
        kl = None if new is None or old is None else [a.float() - b.float() for a, b in zip(new, old, strict=True)]
    if kl is None or not layout.last_stage:
        return None
    split = split_kl(columns, rollout_data, kl, layout)
    metrics = {"kl_reasoning": split.reasoning, "kl_action": split.action, "kl_summary": split.summary}
    rollout_data.update({name: torch.tensor(value) for name, value in metrics.items() if value is not None})
    return split


def split_kl(
    columns: TurnColumns, rollout_data: MutableMapping[str, Any], kl: Sequence[Tensor], layout: Layout
) -> KlSplit:
    """Average over the trained tokens of all ranks; `kl` has this rank's slice of each sample, in nats per token."""
    local = local_tokens(rollout_data, layout)
    nothing = kl[0].new_zeros(0) if kl else torch.zeros(0)
    mask = torch.cat([*rollout_data["loss_masks"], nothing]).bool()
    flat = torch.cat([*kl, nothing]).double()
    notes = per_token((~columns.moves).float(), columns, local.lengths, otherwise=0.0).bool().to(mask.device)
    responses, has_action = whole_numbers(local.lengths), columns.action_start >= 0
    starts = (responses.cumsum(0) - responses)[columns.sample] + columns.action_start
    acts = torch.zeros(len(mask), dtype=torch.bool)
    acts[span_positions(starts[has_action], (columns.end - columns.action_start)[has_action])] = True
    acts = acts.to(mask.device) & ~notes
    parts = torch.stack([local.pick(mask & part) for part in (~acts & ~notes, acts, notes)])
    kept = torch.where(parts, flat, 0.0)  # a masked token's KL may be NaN
    sums = layout.data_context.total(torch.cat([kept.sum(1), parts.sum(1)]), like=flat)
    totals = [float(x) for x in sums]
    reasoning, action, summary = (kl / n if n else None for kl, n in zip(totals[:3], totals[3:], strict=True))
    return KlSplit(reasoning, action, int(totals[3]), int(totals[4]), summary, int(totals[5]))
