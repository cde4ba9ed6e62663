"""DIS, double-sided importance sampling: a policy loss for turns that older weights played (`policy_loss: dis`).

With r = exp(log pi(a) - log pi_rollout(a)), the ratio to the weights that sampled the token, each token's loss is

    -f(r) A log pi(a),   f(r) = r if 1 - eps_clip < r < 1 + eps_clip_high, else 0,

and f(r) carries no gradient. A masked token stays in the mean's denominator. Source: Single-rollout Asynchronous
Optimization (arXiv 2607.07508), equations 1 to 3.
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


def dis_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
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
    # The gradient of -r A is -r A times that of log pi. `where`, because 0 times an overflow would be NaN.
    return torch.where(kept, -ratio * advantages, 0.0), (~kept).float()


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
    """Measure what was masked and how far the policy has moved; slime adds these up over micro-batches and ranks.

    Args:
        ppo_kl, advantages, eps_clip, eps_clip_high: as for `dis_loss`.
        reduce: slime's reducer, from one number per token to a sum.
        staleness: [n] of each token, in actor updates (-1: unknown); adds sums by staleness.
    """
    ratio = ratio_of(ppo_kl.detach())
    low, high = ratio <= 1 - eps_clip, ratio >= 1 + eps_clip_high
    up = advantages > 0
    found = {
        "dis_masked_low_positive": reduce((low & up).float()),
        "dis_masked_low_negative": reduce((low & ~up).float()),
        "dis_masked_high_positive": reduce((high & up).float()),
        "dis_masked_high_negative": reduce((high & ~up).float()),
        **_sums("dis", torch.ones_like(ratio), ratio, reduce),
    }
    if staleness is None:
        return found
    for age in range(MAX_STALENESS_BUCKET + 1):
        here = ((staleness == age) if age < MAX_STALENESS_BUCKET else (staleness >= age)).float()
        found |= _sums(f"dis_stale{age}", here, ratio, reduce)
        found[f"dis_stale{age}_masked"] = reduce(here * (low | high).float())
    return found


def _sums(prefix: str, here: Tensor, ratio: Tensor, reduce: Reducer) -> dict[str, Tensor]:
    """The number of tokens that are `here`, and the sums of their ratios and of the squares."""
    sums = {"share": here, "ratio": here * ratio, "ess": here * ratio**2}
    return {f"{prefix}_{name}": reduce(x) for name, x in sums.items()}


def finish_dis(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the sums of `dis_metrics` in the metrics of a whole training step into means over their tokens.

    `dis_ess` is the effective sample size (sum r)^2 / (n sum r^2). Means without tokens are left out.
    """
    found = dict(metrics)
    for prefix in ("dis", *(f"dis_stale{age}" for age in range(MAX_STALENESS_BUCKET + 1))):
        names = [f"{prefix}_{name}" for name in ("share", "ratio", "ess", "masked")]
        if names[0] not in found:
            continue
        share, ratio, square, masked = (float(found.pop(name, 0.0)) for name in names)
        means = {names[1]: ratio / share, names[2]: ratio**2 / (share * square)} if share > 0 and square > 0 else {}
        if prefix != "dis":
            means |= {names[0]: share, **({names[3]: masked / share} if means else {})}
        found |= means
    return found


def install_dis(loss: Any, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
    """Put DIS in the place of slime's `compute_policy_loss`, and report its metrics."""
    seen: list[tuple[Tensor, Tensor]] = []

    def compute(ppo_kl: Tensor, advantages: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen[:] = [(ppo_kl.detach(), advantages)]
        return dis_loss(ppo_kl, advantages, *args, **kwargs)

    def reporting(policy_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> Any:
        @functools.wraps(policy_loss)
        def reported(
            args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = policy_loss(args, batch, logits, sum_of_sample_mean)
            ppo_kl, advantages = seen.pop()
            rows = batch.get(STALENESS)
            stale = torch.cat(list(rows)) if rows else None
            return loss, metrics | dis_metrics(
                ppo_kl, advantages, args.eps_clip, args.eps_clip_high, sum_of_sample_mean, stale
            )

        return reported

    replace(loss, "compute_policy_loss", lambda _: compute)
    replace(loss, "policy_loss_function", reporting)
