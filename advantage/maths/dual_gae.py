"""Dual-discount GAE: one discount between the tokens of a turn, another between turns.

For token j of a turn with n tokens: V_j is the value of the prefix before the token, k_j the token's reward, and r the
turn's reward.

    d_j     = k_j + gamma_token V_{j+1} - V_j                               j < n-1
    d_{n-1} = k_{n-1} + r + gamma_step V(next turn's first token) - V_{n-1}
    A_j     = d_j + gamma_token lambda_token A_{j+1}                        j < n-1
    A_{n-1} = d_{n-1} + gamma_step lambda_step A(next turn's first token)

Method: each turn is cut into chunks. Inside a chunk, the recursion is one small matrix product. Between chunks and
between turns it is affine in what follows (A = a + b A_next with 0 <= b <= 1), so pointer doubling solves it in
log2(depth) steps. All sums are float64, and nothing is divided by a power of a discount, so any discount and any
length of turn are safe.

Sources: Verlog's paper, appendix B.3; GAE: Schulman et al. 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.maths.checks import check_tokens, check_turns

CHUNK = 32
"""Tokens per chunk: the smallest matrix that keeps a CPU core busy."""


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
    rewards, bootstrap = _float64(turn_rewards), _float64(bootstrap_values)
    first = _first_values(values, lengths, rewards, following, bootstrap, d)
    at_end = rewards + d.gamma_step * gather_next(first, following, bootstrap)
    advantages = _scan(_deltas(values, token_rewards, lengths, at_end, d), lengths, following, d)
    return advantages.to(values.dtype), torch.add(advantages, values, out=torch.empty_like(values))


def solve_chain(a: Tensor, b: Tensor, following: Tensor) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[following[i]]; a `following` of -1 ends a chain. All [n], no cycles."""
    n = a.numel()
    a, b = torch.cat([a, a.new_zeros(1)]), torch.cat([b, b.new_zeros(1)])
    jump = _with_sentinel(following)
    while bool((jump != n).any()):
        # index_select is several times faster on a CPU than indexing.
        a = torch.addcmul(a, b, a.index_select(0, jump))
        b, jump = b * b.index_select(0, jump), jump.index_select(0, jump)
    return a[:n]


def _with_sentinel(following: Tensor) -> Tensor:
    """`following` with one extra entry that points at itself and ends every chain."""
    n = following.numel()
    return torch.cat([torch.where(following < 0, n, following), following.new_full((1,), n)])


def gather_next(x: Tensor, following: Tensor, otherwise: Tensor) -> Tensor:
    """x[following], or `otherwise` if nothing follows; all [T]."""
    return torch.where(following >= 0, x[following.clamp(min=0)], otherwise) if x.numel() else otherwise


def _first_values(
    values: Tensor, lengths: Tensor, rewards: Tensor, following: Tensor, bootstrap: Tensor, d: Discounts
) -> Tensor:
    """Value of the state in which each turn starts, [T]; `dual_discount_gae` explains turns of length 0."""
    empty = lengths == 0
    starts = (lengths.cumsum(0) - lengths).clamp(max=max(values.numel() - 1, 0))
    first = values[starts].to(rewards.dtype) if values.numel() else torch.zeros_like(rewards)
    if not bool(empty.any()):
        return first
    a = torch.where(empty, rewards + d.gamma_step * gather_next(torch.zeros_like(first), following, bootstrap), first)
    return solve_chain(a, d.gamma_step * empty.to(a.dtype), following)


def _deltas(values: Tensor, token_rewards: Tensor, lengths: Tensor, at_end: Tensor, d: Discounts) -> Tensor:
    """One-step errors [N]; `at_end` [T] is r + gamma_step V(next), added at a turn's last token."""
    nonempty = lengths > 0
    ends = (lengths.cumsum(0) - 1)[nonempty]
    deltas = token_rewards.to(at_end.dtype, copy=True).sub_(values)
    last = deltas[ends] + at_end[nonempty]
    deltas[:-1].add_(values[1:], alpha=d.gamma_token)
    deltas[ends] = last
    return deltas


def _scan(deltas: Tensor, lengths: Tensor, following: Tensor, d: Discounts) -> Tensor:
    """Advantages [N] from one-step errors [N].

    Each turn is padded on the left to whole chunks, so every chunk ends in its last column. What follows a chunk
    therefore reaches column j with the same factor c^(CHUNK-1-j) in every chunk.
    """
    counts = ((lengths + CHUNK - 1) // CHUNK).clamp(min=1)
    pads = counts * CHUNK - lengths
    position = _padded_positions(lengths, pads)
    last = counts.cumsum(0) - 1
    first = last + 1 - counts
    chunks = int(last[-1]) + 1 if counts.numel() else 0

    decay = d.token_decay ** torch.arange(CHUNK, dtype=deltas.dtype, device=deltas.device)
    grid = deltas.new_zeros(chunks * CHUNK).scatter_(0, position, deltas)
    local = grid.view(chunks, CHUNK) @ _chunk_matrix(decay).T

    link = deltas.new_full((chunks,), d.token_decay)
    link[last] = d.step_decay
    after = torch.arange(1, chunks + 1, device=deltas.device)
    after[last] = torch.where(following >= 0, first[following.clamp(min=0)], -1)
    # An empty turn is one chunk of padding: a = 0, b = step_decay.
    column = torch.zeros_like(after)
    column[first] = pads.clamp(max=CHUNK - 1)
    a = local.gather(1, column[:, None])[:, 0]
    b = link * decay[CHUNK - 1 - column]
    carry = link * gather_next(solve_chain(a, b, after), after, torch.zeros_like(a))
    return torch.index_select(local.addr_(carry, decay.flip(0)).view(-1), 0, position, out=deltas)


def _padded_positions(lengths: Tensor, pads: Tensor) -> Tensor:
    """Position of each packed token once `pads` [T] empty entries precede each turn; [N], ascending."""
    nonempty = lengths > 0
    steps = torch.ones(int(lengths.sum()), dtype=torch.long, device=lengths.device)
    steps[(lengths.cumsum(0) - lengths)[nonempty]] += torch.diff(pads.cumsum(0)[nonempty], prepend=pads.new_ones(1))
    return torch.cumsum(steps, 0, out=steps)


def _chunk_matrix(decay: Tensor) -> Tensor:
    """M[j, k] = decay^(k-j) for k >= j, else 0."""
    steps = torch.arange(CHUNK, device=decay.device)
    gap = steps[None, :] - steps[:, None]
    return torch.where(gap >= 0, decay[gap.clamp(min=0)], 0.0)


def _float64(x: Tensor) -> Tensor:
    return x.double() if x.device.type != "mps" else x.float()
