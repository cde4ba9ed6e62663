"""The forms of GAE that the hook can compute, all on the same turns and the same exchange; `gae_form` chooses one.

A form says what happens inside a turn, and what the turn before may see of it: a value v, an advantage a, and how
much of what follows reaches that advantage. Between turns every form does the same, with gamma_step and lambda_step:

    what reaches a turn's last token = gamma_step v' + gamma_step lambda_step a'      (' : the next turn's)

- `dual`: dual-discount GAE; see `advantage/maths/dual_gae.py`.
- `token`: one discount for all tokens of the episode, gamma_step and lambda_step also inside turns.
- `turn`: GAE over turns (as in turn-wise PPO); all tokens of a turn share its advantage and its return.
- `bi_level`: GAE over the turns' last tokens, then inside each turn from its last token back, with gamma_token and
  lambda_token (VAGEN, RAGEN). Here the reward of every token counts once, truncation is no termination, and a turn's
  last token is the last one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advantage.maths.dual_gae import Discounts, dual_discount_gae
from advantage.maths.packing import PackedTurns


@dataclass(frozen=True)
class TurnScan:
    """One form's work inside turns; N tokens, T turns (entries of turns without tokens mean nothing)."""

    alone: Tensor
    """[N] advantages as if nothing followed any turn."""
    reach: Tensor
    """[N] how much of what reaches a turn's last token reaches this one."""
    baseline: Tensor
    """[N] what to add to the advantage for the return."""
    v: Tensor
    """[T] the value that the turn before bootstraps from."""
    a: Tensor
    """[T] the advantage that it hands on, as if nothing followed."""
    a_reach: Tensor
    """[T] how much of what follows reaches that advantage."""


def scan_dual(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """Dual-discount GAE inside turns."""
    lengths = packed.lengths
    alone, _ = dual_discount_gae(
        values,
        rewards,
        lengths,
        packed.rewards,
        torch.full_like(lengths, -1),
        torch.zeros_like(packed.rewards),
        **vars(d),
    )
    reach = d.token_decay ** tokens_to_end(lengths).to(values.dtype)
    head = lambda x: _pick(x, lengths.cumsum(0) - lengths)
    return TurnScan(alone, reach, values, head(values), head(alone), head(reach))


def scan_token(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """One discount for all tokens."""
    return scan_dual(values, rewards, packed, Discounts(d.gamma_step, d.lambda_step, d.gamma_step, d.lambda_step))


def scan_turn(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """The turn as one action: its reward is the sum over its tokens, its value that of its first token."""
    lengths = packed.lengths
    turn = token_turns(lengths)
    paid = packed.rewards.index_add(0, turn, rewards)
    state = _pick(values, lengths.cumsum(0) - lengths)
    one = torch.ones_like(state)
    return TurnScan((paid - state)[turn], one[turn], state[turn], state, paid - state, one)


def scan_bi_level(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """Inside turns as dual, but the turn before sees the last token's value, and the rewards on the way to it."""
    inside = scan_dual(values, rewards, packed, d)
    lengths = packed.lengths
    tail = lambda x: _pick(x, lengths.cumsum(0) - 1)
    before = packed.rewards.new_zeros(len(lengths)).index_add(0, token_turns(lengths), rewards) - tail(rewards)
    return replace(inside, v=before + tail(values), a=tail(inside.alone), a_reach=torch.ones_like(before))


FORMS: dict[str, Callable[[Tensor, Tensor, PackedTurns, Discounts], TurnScan]] = {
    "dual": scan_dual,
    "token": scan_token,
    "turn": scan_turn,
    "bi_level": scan_bi_level,
}


def token_turns(lengths: Tensor) -> Tensor:
    """The turn of each packed token; [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def tokens_to_end(lengths: Tensor) -> Tensor:
    """For each packed token how many tokens of its turn come after it; [N]."""
    ends = lengths.cumsum(0) - 1
    return torch.repeat_interleave(ends, lengths) - torch.arange(int(lengths.sum()), device=lengths.device)


def _pick(x: Tensor, positions: Tensor) -> Tensor:
    """x at the positions; anything where a position lies outside (turns without tokens)."""
    return x[positions.clamp(0, len(x) - 1)] if len(x) else x.new_zeros(len(positions))
