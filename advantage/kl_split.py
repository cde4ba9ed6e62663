"""slime's `--rollout-data-postprocess-path`: KL to the reference policy, of reasoning and of action tokens apart.

A policy that learns to game its reward often moves its actions first and lets the reasoning stand as decoration; then
the action tokens' KL outgrows the reasoning's, update after update. slime calls this in the actor after the
advantages and before its logger, so the two means appear beside `rollout/kl`. miles hands its hook no data, so there
it says once that it can do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.megatron.context_parallel import response_spans, slice_rows
from advantage.megatron.layout import Layout, current_layout
from advantage.turn_table import TurnRow, pop_turn_table

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE = 5


@dataclass(frozen=True)
class KlSplit:
    """Mean KL a token over all ranks, in nats; 0 where there is no such token."""

    reasoning: float
    action: float
    reasoning_tokens: int
    action_tokens: int


class ActionHackingWatch:
    """Counts updates in a row in which the action's KL grew, and grew faster than the reasoning's."""

    def __init__(self) -> None:
        self.streak = 0
        self._last: KlSplit | None = None

    def update(self, split: KlSplit, patience: int) -> int:
        """Take one update's split in, warn each time the streak is a multiple of `patience`; returns the streak."""
        last, self._last = self._last, split
        if last is None or not split.action_tokens:
            return self.streak
        grown, reasoning_grown = split.action - last.action, split.reasoning - last.reasoning
        self.streak = self.streak + 1 if grown > max(reasoning_grown, 0.0) else 0
        if self.streak and self.streak % patience == 0:
            logger.warning(
                "action hacking? for %d updates in a row the KL of action tokens (now %.4g nats a token) has outgrown "
                "that of reasoning tokens (%.4g): look at recent episodes, raise --kl-coef or lower --lr",
                *(self.streak, split.action, split.reasoning),
            )
        return self.streak


_watch = ActionHackingWatch()
_told = False


def reset() -> None:
    """Forget earlier updates."""
    global _watch, _told
    _watch, _told = ActionHackingWatch(), False


def log_kl_split(
    args: Any, rollout_id: int | None = None, rollout_data: MutableMapping[str, Any] | None = None
) -> KlSplit | None:
    """Add `kl_reasoning`, `kl_action` and `kl_action_streak` to what slime logs, and take the turn table out.

    Args:
        args: slime's; `action_hacking_patience` is the number of updates before a warning.
        rollout_id: unused; slime passes it.
        rollout_data: the actor's, after `compute_advantages`.

    Returns:
        The split; None where this process has no KL (other pipeline stages, no reference policy).

    Raises:
        TurnTableError: the table is missing or foreign.
    """
    global _told
    if rollout_data is None:
        if not _told:
            logger.warning("this framework gives --rollout-data-postprocess-path no data, so KL is not split")
        _told = True
        return None
    rows, layout = pop_turn_table(rollout_data), current_layout()
    kl = _token_kl(args, rollout_data) if layout.last_stage else None
    if kl is None:
        return None
    split = split_kl(rows, rollout_data, kl, layout)
    streak = _watch.update(split, getattr(args, "action_hacking_patience", DEFAULT_PATIENCE))
    metrics = {"kl_reasoning": split.reasoning, "kl_action": split.action, "kl_action_streak": float(streak)}
    rollout_data.update({name: torch.tensor(value) for name, value in metrics.items()})
    return split


def split_kl(
    rows: Sequence[TurnRow], rollout_data: MutableMapping[str, Any], kl: Sequence[Tensor], layout: Layout
) -> KlSplit:
    """Means over the trained tokens of all ranks; `kl` has this rank's slice of every sample."""
    masks = rollout_data["loss_masks"]
    spans = response_spans(rollout_data, layout)
    action = slice_rows([action_tokens(row, mask) for row, mask in zip(rows, masks, strict=True)], spans)
    trained = slice_rows([mask.bool() for mask in masks], spans)
    nothing = kl[0].new_zeros(0) if kl else torch.zeros(0)
    flat = torch.cat([*kl, nothing]).double()
    acts, all_trained = (torch.cat([*x, nothing]).bool() for x in (action, trained))
    thinks = all_trained & ~acts
    sums = torch.stack([(flat * thinks).sum(), (flat * acts).sum(), thinks.sum().double(), acts.sum().double()])
    if layout.data_context.size > 1:
        sums = sums.to(layout.data_context.device_like(flat))
        dist.all_reduce(sums, group=layout.data_context.handle)
    thought, acted, thinking, acting = sums.tolist()
    return KlSplit(thought / max(thinking, 1), acted / max(acting, 1), int(thinking), int(acting))


def action_tokens(row: TurnRow, mask: Tensor) -> Tensor:
    """Trained tokens from each turn's action on, [n] bool; a turn without a recognised action has none."""
    inside = torch.zeros_like(mask, dtype=torch.bool)
    for turn in row.turns:
        if turn.action_start >= 0:
            inside[turn.action_start : turn.end] = True
    return inside & mask.bool()


def _token_kl(args: Any, rollout_data: MutableMapping[str, Any]) -> Sequence[Tensor] | None:
    """The KL that slime charged; where it charged none, the log-ratio to the reference, if it has one."""
    if getattr(args, "kl_coef", 0.0) and rollout_data.get("kl") is not None:
        return rollout_data["kl"]
    new, old = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
    if new is None or old is None:
        return None
    return [a.float() - b.float() for a, b in zip(new, old, strict=True)]
