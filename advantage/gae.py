"""Dual-discount GAE: one discount between the tokens of a turn, another between turns.

For token j of a turn with n tokens: V_j is the value of the prefix before the token, k_j the token's reward, and r the
turn's reward.

    d_j     = k_j + gamma_token V_{j+1} - V_j                               j < n-1
    d_{n-1} = k_{n-1} + r + gamma_step V(next turn's first token) - V_{n-1}
    A_j     = d_j + gamma_token lambda_token A_{j+1}                        j < n-1
    A_{n-1} = d_{n-1} + gamma_step lambda_step A(next turn's first token)

Method: `advantage/scan.py` solves the recursion inside turns, and `advantage/maths/chain.py` between them, where
it is affine in what follows (A = a + b A_next with 0 <= b <= 1). All sums are float64, and nothing is divided by a
power of a discount, so any discount and any length of turn are safe.

Sources: Verlog's paper, appendix B.3; GAE: Schulman et al. 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.maths.chain import gather_next, solve_chain
from advantage.maths.checks import check_tokens, check_turns
from advantage.scan import TokenRewards, scan_turns


@dataclass(frozen=True)
class Discounts:
    """The four discounts, each in [0, 1]."""

    gamma_step: float
    lambda_step: float
    gamma_token: float
    lambda_token: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")

    @property
    def token_decay(self) -> float:
        return self.gamma_token * self.lambda_token

    @property
    def step_decay(self) -> float:
        return self.gamma_step * self.lambda_step


@torch.no_grad()
def dual_discount_gae(
    values: Tensor,
    token_rewards: Tensor,
    turn_lengths: Tensor,
    turn_rewards: Tensor,
    next_turn: Tensor,
    bootstrap_values: Tensor,
    *,
    gamma_step: float,
    lambda_step: float,
    gamma_token: float,
    lambda_token: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of all tokens of all turns.

    N tokens, T turns. The tokens of a turn are adjacent, and turns are in index order. A turn of length 0 is a step
    without any token of the model: its value is r + gamma_step V(next), so its error is 0, and it counts as one step.

    Args:
        values: [N] floating, the value of the prefix before each token.
        token_rewards: [N] floating, reward of each token, without the turn's.
        turn_lengths: [T] integer, tokens of each turn; they sum to N.
        turn_rewards: [T] floating, given at each turn's last token.
        next_turn: [T] integer, index of the turn that follows in the same episode, anywhere in the batch; -1 if none.
        bootstrap_values: [T] floating, the value of the state after the turn if `next_turn` is -1 (0 if the episode
            terminated); ignored otherwise.
        gamma_step, lambda_step: discounts from a turn's last token to the next turn.
        gamma_token, lambda_token: discounts from token to token inside a turn.

    Returns:
        advantages [N] and returns (advantages + values) [N], in `values`' dtype, on its device.

    Raises:
        ValueError: an argument is invalid; names it and the position.
    """
    d = Discounts(gamma_step, lambda_step, gamma_token, lambda_token)
    check_tokens(values, token_rewards)
    check_turns(values, turn_lengths, turn_rewards, next_turn, bootstrap_values)
    lengths, following = turn_lengths.long(), next_turn.long()
    rewards, bootstrap = turn_rewards.double(), bootstrap_values.double()
    scan = scan_turns(values, TokenRewards(token_rewards), lengths, rewards, d.gamma_token, d.token_decay)
    empty, nothing = (lengths == 0).double(), torch.zeros_like(rewards)
    worth = rewards + d.gamma_step * torch.where(following < 0, bootstrap, 0.0)
    first = solve_chain(torch.where(lengths > 0, scan.entry_value, worth), d.gamma_step * empty, following)
    next_value = gather_next(first, following, bootstrap)
    entry = scan.entry_advantage + d.gamma_step * scan.entry_decay * next_value
    advantage = solve_chain(entry, d.step_decay * (scan.entry_decay + empty), following)
    carry = d.gamma_step * next_value + d.step_decay * gather_next(advantage, following, nothing)
    return scan.finish(carry)
