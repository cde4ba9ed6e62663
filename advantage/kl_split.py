"""slime's `--rollout-data-postprocess-path`: KL to the reference policy, of reasoning and of action tokens apart.

A policy that learns to game its reward often moves its actions first and lets the reasoning stand as decoration. Then
the action tokens' KL grows several times as fast as the reasoning's, and the watch below warns. slime calls this in the
actor after the advantages and before its logger, so the two means appear beside `rollout/kl`. miles hands its hook no
data, so there it says once that it can do nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.megatron.context_parallel import response_spans, slice_rows
from advantage.megatron.layout import Layout, current_layout
from advantage.settings import AdvantageFlags, PerRun, advantage_flags, advantage_settings
from advantage.turn_table import TurnRow, read_turn_table

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE = 3
OUTGROWTH = 2.0
"""How many times as fast as the reasoning's the action's KL may grow."""
FALSE_ALARMS = 0.05
"""Share of runs, of any length, that are warned about by chance."""
_STAKES = (0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class KlSplit:
    """Mean KL per token over all ranks, in nats; None where there is no such token."""

    reasoning: float | None
    action: float | None
    reasoning_tokens: int
    action_tokens: int


class GrowthEvidence:
    """Evidence that a series grows: the wealth of bets on its next step being positive, 0 at first.

    Each bet stakes a fixed share of the wealth on the step's size relative to earlier steps, capped at 1. If steps are
    as likely down as up, whatever their size, no bet gains on average, so the chance that the wealth ever reaches w is
    at most 1/w, however long the run (Ville's inequality). Part of the capital enters at every step, so that growth
    that begins late is found too. See Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables by
    betting".
    """

    def __init__(self) -> None:
        self._wealth = [0.0] * len(_STAKES)
        self._steps, self._travelled = 0, 0.0

    @property
    def wealth(self) -> float:
        return sum(self._wealth)

    def add(self, step: float) -> None:
        """Settle the bets on the series' next step."""
        usual = self._travelled / self._steps if self._steps else 0.0
        outcome = max(-1.0, min(1.0, step / usual)) if usual else 0.0
        self._steps, self._travelled = self._steps + 1, self._travelled + abs(step)
        fresh = 1.0 / (self._steps * (self._steps + 1) * len(_STAKES))
        self._wealth = [(old + fresh) * (1 + stake * outcome) for old, stake in zip(self._wealth, _STAKES, strict=True)]


class ActionHackingWatch:
    """Warns when the action's KL grows, and does so more than `OUTGROWTH` times as fast as the reasoning's.

    `patience` updates are averaged into one point: with more, noise matters less and a warning comes later. Of runs
    whose KL wanders without a trend, or whose two KLs grow at rates less than `OUTGROWTH` apart, at most `FALSE_ALARMS`
    are ever warned about.
    """

    def __init__(self) -> None:
        self._block: list[KlSplit] = []
        self._point: tuple[float, float] | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._growth, self._outgrowth = GrowthEvidence(), GrowthEvidence()

    @property
    def evidence(self) -> float:
        """Where `FALSE_ALARMS` is 0.05 a warning is due at 20."""
        return min(self._growth.wealth, self._outgrowth.wealth)

    def update(self, split: KlSplit, patience: int) -> float:
        """Take in the split of one update, warn if that is due, and return the evidence before any reset.

        Updates that lack action or reasoning tokens say nothing about either and are skipped.
        """
        if split.action is None or split.reasoning is None:
            return self.evidence
        self._block.append(split)
        if len(self._block) < patience:
            return self.evidence
        point = tuple(sum(kl) / patience for kl in zip(*((s.reasoning, s.action) for s in self._block), strict=True))
        last, self._point, self._block = self._point, point, []
        if last is None:
            return self.evidence
        reasoning_step, action_step = point[0] - last[0], point[1] - last[1]
        self._growth.add(action_step)
        self._outgrowth.add(action_step - OUTGROWTH * reasoning_step)
        evidence = self.evidence
        if evidence >= 1 / FALSE_ALARMS:
            logger.warning(
                "action hacking? the KL of action tokens (now %.4g nats per token) grows more than %g times as fast as "
                "that of reasoning tokens (%.4g): look at recent episodes, raise --kl-coef or lower --lr",
                *(split.action, OUTGROWTH, split.reasoning),
            )
            self._start_over()
        return evidence


_watch = PerRun(ActionHackingWatch)


@functools.cache
def _warn_once() -> None:
    logger.warning("this framework gives --rollout-data-postprocess-path no data, so KL is not split")


def log_kl_split(
    args: Any, rollout_id: int | None = None, rollout_data: MutableMapping[str, Any] | None = None
) -> KlSplit | None:
    """Add `kl_reasoning`, `kl_action` and `kl_action_evidence` to what slime logs, and take the turn table out.

    A mean over no tokens is left out, not logged as 0.

    Args:
        args: slime's; `action_hacking_patience` is the number of updates that the watch averages into one point.
        rollout_id: unused; slime passes it.
        rollout_data: the actor's, after `compute_advantages`.

    Returns:
        The split; None where this process has no KL (other pipeline stages, no reference policy).

    Raises:
        TurnTableError: the table is missing or foreign.
    """
    if rollout_data is None:
        _warn_once()
        return None
    rows, layout = read_turn_table(rollout_data, keep=False), current_layout()
    kl = _token_kl(advantage_flags(args), rollout_data) if layout.last_stage else None
    if kl is None:
        return None
    split = split_kl(rows, rollout_data, kl, layout)
    evidence = _watch.of(args).update(split, advantage_settings(args).action_hacking_patience)
    metrics = {"kl_reasoning": split.reasoning, "kl_action": split.action, "kl_action_evidence": evidence}
    rollout_data.update({name: torch.tensor(value) for name, value in metrics.items() if value is not None})
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
    return KlSplit(
        thought / thinking if thinking else None, acted / acting if acting else None, int(thinking), int(acting)
    )


def action_tokens(row: TurnRow, mask: Tensor) -> Tensor:
    """Trained tokens from each turn's action on, [n] bool; a turn without a recognised action has none."""
    inside = torch.zeros_like(mask, dtype=torch.bool)
    for turn in row.turns:
        if turn.action_start >= 0:
            inside[turn.action_start : turn.end] = True
    return inside & mask.bool()


def _token_kl(flags: AdvantageFlags, rollout_data: MutableMapping[str, Any]) -> Sequence[Tensor] | None:
    """The KL that slime charged; where it charged none, the log-ratio to the reference, if it has one."""
    if flags.kl_coef and rollout_data.get("kl") is not None:
        return rollout_data["kl"]
    new, old = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
    if new is None or old is None:
        return None
    return [a.float() - b.float() for a, b in zip(new, old, strict=True)]
