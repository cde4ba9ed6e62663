"""Input checks of `dual_discount_gae`: every ValueError names the argument and the position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def check_tokens(values: Tensor, token_rewards: Tensor) -> None:
    """Refuse token vectors that differ in length or are not finite."""
    n = _vector("values", values, floating=True)
    if _vector("token_rewards", token_rewards, floating=True) != n:
        raise ValueError(f"token_rewards has {token_rewards.numel()} entries, values has {n}")
    _finite("values", values)
    _finite("token_rewards", token_rewards)


def check_turns(values: Tensor, lengths: Tensor, rewards: Tensor, following: Tensor, bootstrap: Tensor) -> None:
    """Refuse turns that do not fit the tokens, or whose order is impossible."""
    t = _vector("turn_lengths", lengths, floating=False)
    per_turn = {"turn_rewards": rewards, "next_turn": following, "bootstrap_values": bootstrap}
    for name, x in per_turn.items():
        if _vector(name, x, floating=name != "next_turn") != t:
            raise ValueError(f"{name} has {x.numel()} entries, turn_lengths has {t}")
        if x.device != values.device:
            raise ValueError(f"{name} is on {x.device}, values is on {values.device}")
    _finite("turn_rewards", rewards)
    _finite("bootstrap_values", bootstrap)
    _refuse(lengths < 0, "turn_lengths", lengths, "must not be negative")
    if int(lengths.sum()) != values.numel():
        raise ValueError(f"turn_lengths sum to {int(lengths.sum())}, values has {values.numel()} entries")
    _refuse((following < -1) | (following >= t), "next_turn", following, f"must be -1 or a turn below {t}")
    preceded = torch.bincount(following[following >= 0].long(), minlength=t) > 1
    if bool(preceded.any()):
        turn = int(preceded.nonzero()[0])
        k, m = (int(i) for i in (following == turn).nonzero()[:2, 0])
        raise ValueError(f"next_turn[{k}] and next_turn[{m}] are both {turn}, but a turn can follow only one turn")
    jump = torch.cat([torch.where(following < 0, t, following), following.new_full((1,), t)]).long()
    for _ in range(t.bit_length()):
        jump = jump[jump]
    _refuse(jump[:t] != t, "next_turn", following, "is part of a cycle")


def _vector(name: str, x: Any, *, floating: bool) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(x.shape)}")
    if x.is_floating_point() != floating or x.dtype == torch.bool or x.is_complex():
        raise ValueError(f"{name} must be {'floating' if floating else 'integer'}, got {x.dtype}")
    return x.numel()


def _finite(name: str, x: Tensor) -> None:
    # One sum is several times cheaper than checking every entry, so entries are checked only if the sum is not finite.
    if not math.isfinite(float(x.sum())):
        _refuse(~torch.isfinite(x), name, x, "must be finite")


def _refuse(wrong: Tensor, name: str, x: Tensor, rule: str) -> None:
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(f"{name}[{position}] is {x[position].item()}: it {rule}")
