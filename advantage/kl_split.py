"""slime's `--rollout-data-postprocess-path`: logs the KL to the reference policy for reasoning, actions and notes.

A policy that games its reward often changes its actions first: their KL then grows several times as fast as that of
the reasoning, and `ActionHackingWatch` warns.
"""

import functools
import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.flags import advantage_flags
from advantage.packing import per_token, span_positions
from advantage.ranks import Layout, current_layout, local_tokens
from advantage.settings import PerRun, advantage_settings
from advantage.turn_table import TurnColumns, read_turn_table, whole_numbers

logger = logging.getLogger(__name__)

OUTGROWTH = 2.0
"""Largest ratio of the growth of the action's KL to that of the reasoning's that causes no warning."""
FALSE_ALARMS = 0.05
"""Share of runs, of any length, with a warning by chance."""
_STAKES = (0.1, 0.2, 0.4, 0.8)


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


class GrowthEvidence:
    """Evidence that a series grows: the wealth of a bettor who bets that each next step is positive; 0 at first.

    Each bet stakes a fixed share of the wealth; its payoff is the step relative to the mean size of earlier ones,
    clipped to [-1, 1]. Without growth, the probability that the wealth ever reaches w is at most 1/w (Ville's
    inequality). Source: Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables by betting".
    """

    def __init__(self) -> None:
        self._wealth = [0.0] * len(_STAKES)
        self._steps, self._travelled = 0, 0.0

    @property
    def wealth(self) -> float:
        return sum(self._wealth)

    def add(self, step: float) -> None:
        """Update the wealth with the series' next step."""
        usual = self._travelled / self._steps if self._steps else 0.0
        outcome = max(-1.0, min(1.0, step / usual)) if usual else 0.0
        self._steps, self._travelled = self._steps + 1, self._travelled + abs(step)
        fresh = 1.0 / (self._steps * (self._steps + 1) * len(_STAKES))
        self._wealth = [(old + fresh) * (1 + stake * outcome) for old, stake in zip(self._wealth, _STAKES, strict=True)]


class ActionHackingWatch:
    """Warns when the action's KL grows more than `OUTGROWTH` times as fast as the reasoning's.

    Averages `patience` updates into one point. Without such growth, at most a share `FALSE_ALARMS` of runs ever warns.
    """

    def __init__(self) -> None:
        self._block: list[tuple[float, float]] = []
        self._point: tuple[float, float] | None = None
        self._growth, self._outgrowth = GrowthEvidence(), GrowthEvidence()

    @property
    def evidence(self) -> float:
        """The current evidence; a warning is logged at 1 / `FALSE_ALARMS`, which is 20."""
        return min(self._growth.wealth, self._outgrowth.wealth)

    def update(self, split: KlSplit, patience: int) -> float:
        """Add the split of one update, if it has both kinds of tokens; returns the evidence before any reset."""
        if split.action is None or split.reasoning is None:
            return self.evidence
        self._block.append((split.reasoning, split.action))
        if len(self._block) < patience:
            return self.evidence
        point = sum(kl for kl, _ in self._block) / patience, sum(kl for _, kl in self._block) / patience
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
            self._growth, self._outgrowth = GrowthEvidence(), GrowthEvidence()
        return evidence


_watch = PerRun(ActionHackingWatch)
_warn_once = functools.cache(logger.warning)


def log_kl_split(
    args: Any, rollout_id: int | None = None, rollout_data: MutableMapping[str, Any] | None = None
) -> KlSplit | None:
    """Add `kl_reasoning`, `kl_action`, `kl_summary` and `kl_action_evidence` to slime's metrics, remove the turn table.

    Args:
        rollout_data: the actor's, after `compute_advantages`; None on miles.

    Returns:
        The split; None if this process has no KL (other pipeline stages, no reference policy).

    Raises:
        TurnTableError: the table is missing or was written by another converter.
    """
    if rollout_data is None:
        _warn_once("this framework gives --rollout-data-postprocess-path no data, so KL is not split")
        return None
    columns, layout = read_turn_table(rollout_data, keep=False), current_layout()
    kl = rollout_data.get("kl") if advantage_flags(args).kl_coef else None
    if kl is None:  # slime computes no KL for the reward
        new, old = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
        kl = None if new is None or old is None else [a.float() - b.float() for a, b in zip(new, old, strict=True)]
    if kl is None or not layout.last_stage:
        return None
    split = split_kl(columns, rollout_data, kl, layout)
    evidence = _watch.of(args).update(split, advantage_settings(args).action_hacking_patience)
    metrics = {"kl_reasoning": split.reasoning, "kl_action": split.action, "kl_summary": split.summary}
    metrics["kl_action_evidence"] = evidence
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
    parts = torch.stack([local.pick(mask & part).double() for part in (~acts & ~notes, acts, notes)])
    sums = layout.data_context.total(torch.cat([(parts * flat).sum(1), parts.sum(1)]), like=flat)
    totals = [float(x) for x in sums]
    reasoning, action, summary = (kl / n if n else None for kl, n in zip(totals[:3], totals[3:], strict=True))
    return KlSplit(reasoning, action, int(totals[3]), int(totals[4]), summary, int(totals[5]))
