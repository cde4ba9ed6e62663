"""Solves the recursion inside turns, A_j = d_j + c A_{j+1}, for all turns at once; `gae.py` defines d and c.

A loop over tokens would take as many steps as the longest turn has tokens. Doubling takes the logarithm of that: after
step k, each entry holds the sum over the next 2^k tokens, so two such sums give that over 2^(k+1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TurnScan:
    """One form's result inside turns; N tokens, T turns. No entry of a turn without tokens is used."""

    entry_value: Tensor
    """[T] the value from which the previous turn bootstraps."""
    entry_advantage: Tensor
    """[T] the advantage that the previous turn sees, if nothing followed this turn."""
    entry_decay: Tensor
    """[T] decay from the turn's last token to the entry advantage."""
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Advantages and returns [N] in the values' dtype, from what reaches each turn's last token [T]."""


def scan_turns(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, gamma: float, decay: float | Tensor
) -> TurnScan:
    """Solve GAE inside turns.

    Args:
        values: [N] floating.
        rewards: [N], the reward of each token; None if they are all 0.
        lengths: [T] int64, tokens of each turn.
        turn_rewards: [T] float64, given at each turn's last token.
        gamma: the discount between tokens.
        decay: gamma times lambda; one number, or [T] float64 with one for each turn.
    """
    turn = torch.repeat_interleave(lengths)
    last = lengths.cumsum(0) - 1
    to_last = last[turn] - torch.arange(len(values), device=values.device)
    is_last = to_last == 0

    next_value = torch.where(is_last, 0.0, values.double().roll(-1))
    deltas = gamma * next_value - values
    if rewards is not None:
        deltas += rewards
    deltas += torch.where(is_last, turn_rewards[turn], 0.0)

    decay_of_token = (torch.zeros_like(turn_rewards) + decay)[turn]
    longest = int(lengths.max()) if len(lengths) else 0
    alone = solve_runs(deltas, torch.where(is_last, 0.0, decay_of_token), longest)
    reach = decay_of_token ** to_last.double()

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + reach * carry[turn]
        returns = advantages + values
        return advantages.to(values.dtype), returns.to(values.dtype)

    first = last - lengths + 1
    return TurnScan(pick(values, first), pick(alone, first), pick(reach, first), finish)


def pick(x: Tensor, positions: Tensor) -> Tensor:
    """x at the positions, [T] float64; an arbitrary entry if a position is out of range (turns without tokens)."""
    if not len(x):
        return x.new_zeros(len(positions)).double()
    return x[positions.clamp(0, len(x) - 1)].double()


def solve_chain(a: Tensor, b: Tensor, following: Tensor) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[following[i]]; a `following` of -1 ends a chain. All [n], no cycles."""
    n = a.numel()
    # One extra entry, which points at itself, ends every chain.
    a = F.pad(a, (0, 1))
    b = F.pad(b, (0, 1))
    jump = F.pad(torch.where(following < 0, n, following), (0, 1), value=n)
    while bool((jump != n).any()):
        # index_select is several times faster on a CPU than indexing.
        a = torch.addcmul(a, b, a.index_select(0, jump))
        b = b * b.index_select(0, jump)
        jump = jump.index_select(0, jump)
    return a[:n]


def solve_runs(a: Tensor, b: Tensor, longest: int) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[i + 1] in place of `a`; of every `longest` adjacent b, at least one is 0. All [n]."""
    step = 1
    while step < min(longest, len(a)):
        a[:-step] += b[:-step] * a[step:]
        b = F.pad(b[:-step] * b[step:], (0, step))
        step *= 2
    return a


def gather_next(x: Tensor, following: Tensor, otherwise: Tensor) -> Tensor:
    """Pick x[following], or `otherwise` if nothing follows; all [T]."""
    return torch.where(following >= 0, x[following.clamp(min=0)], otherwise) if x.numel() else otherwise
