"""Training's GAE on one process, with the order of the turns given as indices instead of a turn table."""

import torch
from torch import Tensor

from advantage.gae import Discounts, edges_of, links_of, solve_inside, solve_links


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
    n, t, numbers = len(values), len(turn_lengths), Discounts(**discounts)
    last = (next_turn < 0).nonzero()[:, 0]
    states = torch.arange(len(last), device=values.device)
    following = torch.cat([next_turn.index_put((last,), t + states), torch.full_like(states, -1)])
    nothing = torch.zeros_like(states)
    values = torch.cat([values, bootstrap_values[last].to(values.dtype)])
    token_rewards = torch.cat([token_rewards, nothing.to(token_rewards.dtype)])
    lengths = torch.cat([turn_lengths, nothing + 1])
    rewards = torch.cat([turn_rewards.double(), nothing.double()])
    is_state = torch.arange(len(lengths), device=values.device) >= t

    inside = solve_inside(values, token_rewards, lengths, rewards, numbers)
    edges = edges_of(torch.ones_like(is_state), numbers)
    links = links_of(inside, lengths, rewards, is_state, edges)
    advantages, returns = inside.finish(edges.carry(*solve_links(links, following)))
    return advantages[:n], returns[:n]
