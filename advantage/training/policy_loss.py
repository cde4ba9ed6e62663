"""DIS, double-sided importance sampling: a policy loss for turns that older weights played
(`policy_loss: dis`).

With r = exp(log pi(a) - log pi_rollout(a)), the ratio to the weights that sampled the token, each
token's loss is

    -f(r) A log pi(a),   f(r) = r if 1 - eps_clip < r < 1 + eps_clip_high, else 0,

and f(r) carries no gradient. A masked token stays in the mean's denominator. Source: Single-rollout
Asynchronous Optimization (arXiv 2607.07508), equations 1 to 3.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from advantage.turn_table import STALENESS

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here, far outside of every interval, so that none overflows."""

MAX_STALENESS_BUCKET = 2
"""The last bucket of the metrics by staleness holds turns of this many actor updates or more."""

Reducer = Callable[[Tensor], Tensor]
PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""slime's `policy_loss_function`."""


def dis_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the DIS loss per token and a mask of the tokens without gradient (1.0), all [n].

    It takes and returns what slime's `compute_policy_loss` does, which it replaces.

    Args:
        ppo_kl: log pi_rollout - log pi per token, in nats.
        eps_clip, eps_clip_high: the interval is (1 - eps_clip, 1 + eps_clip_high), bounds excluded.
        eps_clip_c: must be None; dual clip belongs to PPO.
    """
    ratio = ratio_of(ppo_kl)
    kept = (ratio > 1 - eps_clip) & (ratio < 1 + eps_clip_high)
    # The gradient of -r A is -r A times that of log pi. `where`, because 0 times an overflow would
    # be NaN.
    loss = torch.where(kept, -ratio * advantages, 0.0)
    return loss, (~kept).float()


def ratio_of(ppo_kl: Tensor) -> Tensor:
    """Compute pi / pi_rollout per token."""
    return (-ppo_kl).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def dis_metrics(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    reduce: Reducer,
    staleness: Tensor | None = None,
) -> dict[str, Tensor]:
    """Measure what was masked and how far the policy has moved; slime adds these up over
    micro-batches and ranks.

    Args:
        ppo_kl, advantages, eps_clip, eps_clip_high: as for `dis_loss`.
        reduce: slime's reducer, from one number per token to a sum.
        staleness: [n] of each token, in actor updates (-1: unknown); adds sums by staleness.
    """
    ratio = ratio_of(ppo_kl.detach())
    low = ratio <= 1 - eps_clip
    high = ratio >= 1 + eps_clip_high
    up = advantages > 0
    masked = {
        "low_positive": low & up,
        "low_negative": low & ~up,
        "high_positive": high & up,
        "high_negative": high & ~up,
    }
    found = {f"dis_masked_{name}": reduce(tokens.float()) for name, tokens in masked.items()}
    found |= _sums("dis", torch.ones_like(ratio), ratio, reduce)
    if staleness is None:
        return found
    outside = (low | high).float()
    for age in range(MAX_STALENESS_BUCKET + 1):
        is_last = age == MAX_STALENESS_BUCKET
        here = staleness >= age if is_last else staleness == age
        of_age = here.float()
        found |= _sums(f"dis_stale{age}", of_age, ratio, reduce)
        found[f"dis_stale{age}_masked"] = reduce(of_age * outside)
    return found


def _sums(prefix: str, here: Tensor, ratio: Tensor, reduce: Reducer) -> dict[str, Tensor]:
    """The number of tokens that are `here`, and the sums of their ratios and of the squares."""
    sums = {"share": here, "ratio": here * ratio, "ess": here * ratio**2}
    return {f"{prefix}_{name}": reduce(x) for name, x in sums.items()}


def finish_dis(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the sums of `dis_metrics` in the metrics of a whole training step into means over their
    tokens.

    `dis_ess` is the effective sample size (sum r)^2 / (n sum r^2). Means without tokens are left
    out.
    """
    found = dict(metrics)
    ages = [f"dis_stale{age}" for age in range(MAX_STALENESS_BUCKET + 1)]
    for prefix in ("dis", *ages):
        if f"{prefix}_share" not in found:
            continue
        parts = ("share", "ratio", "ess", "masked")
        share, ratio, square, masked = (float(found.pop(f"{prefix}_{part}", 0.0)) for part in parts)
        by_age = prefix != "dis"
        if by_age:
            found[f"{prefix}_share"] = share
        if share <= 0 or square <= 0:
            continue
        found[f"{prefix}_ratio"] = ratio / share
        found[f"{prefix}_ess"] = ratio**2 / (share * square)
        if by_age:
            found[f"{prefix}_masked"] = masked / share
    return found


def install_dis(loss: Any, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
    """Put DIS in the place of slime's `compute_policy_loss`, and report its metrics."""
    seen: list[tuple[Tensor, Tensor]] = []

    def compute(
        ppo_kl: Tensor, advantages: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        seen[:] = [(ppo_kl.detach(), advantages)]
        return dis_loss(ppo_kl, advantages, *args, **kwargs)

    def reporting(policy_loss: PolicyLoss) -> PolicyLoss:
        @functools.wraps(policy_loss)
        def reported(
            args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = policy_loss(args, batch, logits, sum_of_sample_mean)
            ppo_kl, advantages = seen.pop()
            rows = batch.get(STALENESS)
            stale = torch.cat(list(rows)) if rows else None
            bounds = args.eps_clip, args.eps_clip_high
            ours = dis_metrics(ppo_kl, advantages, *bounds, sum_of_sample_mean, stale)
            return loss, metrics | ours

        return reported

    replace(loss, "compute_policy_loss", lambda _: compute)
    replace(loss, "policy_loss_function", reporting)
