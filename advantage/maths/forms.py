from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from advantage.gae import Discounts
from advantage.scan import TokenRewards, TurnScan, scan_turns

Form = Callable[[Tensor, TokenRewards | None, Tensor, Tensor, Discounts], TurnScan]
"""values [N], rewards of tokens, turn lengths [T], turn rewards [T] and discounts to the result inside turns."""


def scan_dual(
    values: Tensor, rewards: TokenRewards | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Dual-discount GAE inside turns."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_token, d.token_decay)


def scan_token(
    values: Tensor, rewards: TokenRewards | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """One discount for all tokens."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_step, d.step_decay)


def scan_turn(
    values: Tensor, rewards: TokenRewards | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """The turn as one action: its reward is the sum over its tokens, its value that of its first token."""
    turn = torch.repeat_interleave(lengths)
    state = _pick(values, lengths.cumsum(0) - lengths)
    alone = turn_rewards + _totals(rewards, turn, state) - state

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + carry
        return advantages[turn].to(values.dtype), (advantages + state)[turn].to(values.dtype)

    return TurnScan(state, alone, torch.ones_like(state), finish)


def scan_bi_level(
    values: Tensor, rewards: TokenRewards | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Inside turns as `dual`, but the previous turn sees the last token's value, and the rewards before that token."""
    inside = scan_dual(values, rewards, lengths, turn_rewards, d)
    last = lengths.cumsum(0) - 1
    state = _pick(values, last)
    own = _pick(rewards.total(), last) if rewards is not None else torch.zeros_like(state)
    before = _totals(rewards, torch.repeat_interleave(lengths), state) - own
    return TurnScan(before + state, own + turn_rewards - state, torch.ones_like(state), inside.finish)


FORMS: dict[str, Form] = {
    "dual": scan_dual,
    "token": scan_token,
    "turn": scan_turn,
    "bi_level": scan_bi_level,
}


def _totals(rewards: TokenRewards | None, turn: Tensor, like: Tensor) -> Tensor:
    """Sum of the token rewards of each turn, [T]."""
    total = torch.zeros_like(like)
    return total if rewards is None else total.index_add_(0, turn, rewards.total())


def _pick(x: Tensor, positions: Tensor) -> Tensor:
    """x at the positions, [T] float64; an arbitrary entry if a position is out of range (turns without tokens)."""
    return (x[positions.clamp(0, len(x) - 1)] if len(x) else x.new_zeros(len(positions))).double()
