"""Whether the critic's loss had settled when its warm-up ended; a warning if not.

The actor then starts on advantages from a critic that is still learning, which is what the warm-up is there to avoid.
The loss is the mean squared error of values against returns over the trained tokens of all ranks, before each update.
Compared are the last quarter of the warm-up's updates and the quarter before: single batches differ too much.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from advantage.megatron.layout import Group

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 0.25
_FEWEST = 4
"""Updates below which there is nothing to compare."""


def relative_change(losses: Sequence[float]) -> float | None:
    """Change of the mean loss from the last but one quarter to the last, relative to the former; None of too few."""
    quarter = len(losses) // _FEWEST
    if quarter == 0:
        return None
    before = sum(losses[-2 * quarter : -quarter]) / quarter
    after = sum(losses[-quarter:]) / quarter
    return (after - before) / max(before, 1e-12)


def watch_warmup(
    args: Any, rollout_data: Mapping[str, Any], values: Tensor, returns: Tensor, mask: Tensor, group: Group
) -> float | None:
    """Take in one batch of the critic's warm-up; at the warm-up's last one, judge.

    The losses so far are kept on `args` as `critic_warmup_losses`, so they belong to one run in one process. Batches
    after `num_critic_only_steps`, and the actor's (which carry log-probs), are not looked at.

    Args:
        values, returns, mask: flat, one entry a response token of this rank's samples.
        group: data parallelism; every rank of it calls this.

    Returns:
        The relative change at the last batch of the warm-up, else None.
    """
    updates, start = getattr(args, "num_critic_only_steps", 0) or 0, getattr(args, "start_rollout_id", None)
    if not updates or start is None or _is_actors(args, rollout_data):
        return None
    losses: list[float] = vars(args).setdefault("critic_warmup_losses", [])
    if start + len(losses) >= updates:
        return None
    losses.append(_mean_squared_error(values, returns, mask, group))
    if start + len(losses) < updates:
        return None
    return _judge(losses, _tolerance(args))


def _judge(losses: Sequence[float], tolerance: float) -> float | None:
    change = relative_change(losses)
    if change is None:
        logger.info("the critic's warm-up had %d updates since the start, too few to tell a trend", len(losses))
    elif abs(change) > tolerance:
        logger.warning(
            "the critic had not converged when its warm-up of %d updates ended: its loss still moved by %+.0f %% (now "
            "%.4g; critic_warmup.tolerance is %.0f %%); lengthen critic_warmup and --num-critic-only-steps, or change "
            "the critic's learning rate",
            *(len(losses), 100 * change, losses[-1], 100 * tolerance),
        )
    else:
        logger.info("the critic's loss has settled: %+.0f %% over the end of its warm-up", 100 * change)
    return change


def _is_actors(args: Any, rollout_data: Mapping[str, Any]) -> bool:
    return "log_probs" in rollout_data or bool(getattr(args, "use_rollout_logprobs", False))


def _tolerance(args: Any) -> float:
    given = getattr(args, "critic_warmup", None) or {}
    found = given.get("tolerance") if isinstance(given, Mapping) else getattr(given, "tolerance", None)
    return DEFAULT_TOLERANCE if found is None else float(found)


def _mean_squared_error(values: Tensor, returns: Tensor, mask: Tensor, group: Group) -> float:
    error = ((returns - values) ** 2 * mask).sum()
    sums = torch.stack([error, mask.sum().to(error)]).double()
    if group.size > 1:
        sums = sums.to(group.device_like(values))
        dist.all_reduce(sums, group=group.handle)
    total, count = sums.tolist()
    return total / max(count, 1.0)
