"""PPO's losses per token: functions of flat tensors with one entry per response token."""

from typing import Literal

import torch
from torch import Tensor


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of `targets` [n] and entropies [n] in nats, at the rollout's
    temperature."""
    log_probs = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped surrogate loss, and a mask of the tokens that were clipped (1.0 or
    0.0).

    The ratio is clipped to 1 - eps_clip and 1 + eps_clip_high; eps_clip_c bounds the loss of
    negative advantages (dual clip, Ye et al. 2020; None: no bound).
    """
    ratio = (log_probs - old_log_probs).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > plain).float()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Compute the larger of plain and clipped squared error, and a mask of the values that moved
    past the clip."""
    moved = values - old_values
    clipped = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return loss, (moved.abs() > value_clip).float()


def approx_kl(
    log_probs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3", "low_var_kl"]
) -> Tensor:
    """Estimate KL(policy | reference) from the policy's own tokens; source:
    http://joschu.net/blog/kl-approx.html"""
    ratio = log_probs - reference
    match kind:
        case "k1":
            return ratio
        case "k2":
            return ratio**2 / 2
        case "k3" | "low_var_kl":
            return (-ratio).exp() - 1 + ratio
