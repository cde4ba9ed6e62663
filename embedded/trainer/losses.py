"""PPO's losses per token: plain functions of flat tensors, one entry a response token."""

from __future__ import annotations

from typing import Any

import torch


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` [n] and entropies [n] in nats, at the temperature of the rollout."""
    log_probs = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


def policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate, and where clipping took effect (1.0 or 0.0).

    `eps_clip_high` (None: as `eps_clip`) is the upper bound; `eps_clip_c` (None: off) bounds the loss of negative
    advantages (dual clip, Ye et al. 2020).
    """
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    ratio = (log_probs - old_log_probs).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if args.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -args.eps_clip_c * advantages), loss)
    return loss, (clipped > plain).float()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error, the larger of plain and clipped around the old value; and where values moved past the clip."""
    moved = values - old_values
    clipped = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return loss, (moved.abs() > value_clip).float()


def approx_kl(log_probs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Schulman's estimators of KL(policy | reference) from the policy's own tokens: k1, k2 or k3."""
    ratio = log_probs - reference
    if kind == "k1":
        return ratio
    if kind == "k2":
        return ratio**2 / 2
    if kind in ("k3", "low_var_kl"):
        return (-ratio).exp() - 1 + ratio
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl, got {kind!r}")
