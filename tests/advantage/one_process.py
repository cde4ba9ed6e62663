"""Training's GAE on one process, with the order of the turns given as indices instead of a turn table."""

import torch
from torch import Tensor

from advantage import gae
from advantage.gae import Discounts


def dual_discount_gae(
    values: Tensor,
    token_rewards: Tensor,
    turn_lengths: Tensor,
    turn_rewards: Tensor,
    next_turn: Tensor,
    bootstrap_values: Tensor,
    **discounts: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [N] of T turns; `bootstrap_values` [T] counts where `next_turn` [T] is -1."""
    n, t = len(values), len(turn_lengths)
    last = (next_turn < 0).nonzero()[:, 0]
    states = torch.arange(len(last), device=values.device)
    following = next_turn.index_put((last,), t + states)
    nothing = torch.zeros_like(states)
    advantages, returns = gae.dual_discount_gae(
        torch.cat([values, bootstrap_values[last].to(values.dtype)]),
        torch.cat([token_rewards, nothing.to(token_rewards.dtype)]),
        torch.cat([turn_lengths, nothing + 1]),
        torch.cat([turn_rewards.double(), nothing.double()]),
        torch.cat([torch.zeros_like(following, dtype=torch.bool), nothing == 0]),
        torch.ones(len(following) + len(nothing), dtype=torch.bool, device=values.device),
        Discounts(**discounts),
        lambda links: gae.solve_links(links, torch.cat([following, nothing - 1])),
    )
    return advantages[:n], returns[:n]
