"""Replaces `compute_advantages_and_returns` in frameworks that cannot call the hook or whiten over the wrong ranks."""

from collections.abc import Callable, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from advantage.flags import AdvantageFlags, advantage_flags
from advantage.hook import compute_advantages
from advantage.ranks import current_layout, local_tokens
from advantage.training.whitening import whiten


def make_compute_advantages(loss: ModuleType) -> Callable[[Any, MutableMapping[str, Any]], None]:
    """Make a `compute_advantages_and_returns` that computes the framework's KL, calls the hook, and whitens."""

    def compute_advantages_and_returns(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
        layout = current_layout()
        if not layout.last_stage:
            return
        flags = advantage_flags(args)
        log_probs = rollout_data.get("rollout_log_probs" if flags.use_rollout_logprobs else "log_probs")
        rollout_data["kl"] = _kl(flags, rollout_data, log_probs, loss)
        compute_advantages(args, rollout_data)
        if flags.use_opd:
            loss.apply_opd_kl_to_advantages(
                args=args,
                rollout_data=rollout_data,
                advantages=rollout_data["advantages"],
                student_log_probs=log_probs,
            )
        if flags.normalize_advantages:
            local = local_tokens(rollout_data, layout)
            masks = local.split(torch.cat([*rollout_data["loss_masks"], torch.zeros(0, dtype=torch.int)]))
            rollout_data["advantages"] = whiten(rollout_data["advantages"], masks, layout.data_context)

    return compute_advantages_and_returns


def _kl(
    flags: AdvantageFlags, rollout_data: MutableMapping[str, Any], log_probs: Any, loss: ModuleType
) -> list[Tensor]:
    """KL to the reference policy, one row per sample; 0 without a reference (slime's critic, critic-only steps)."""
    reference = rollout_data.get("ref_log_probs")
    if flags.kl_coef == 0 or not log_probs or not reference:
        rows: Sequence[Tensor] = rollout_data.get("values") or ()
        return [torch.zeros_like(values, dtype=torch.float32) for values in rows]
    return [
        loss.compute_approx_kl(new, old, kl_loss_type=flags.kl_loss_type)
        for new, old in zip(log_probs, reference, strict=True)
    ]
