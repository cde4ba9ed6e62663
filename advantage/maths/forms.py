"""The forms of GAE that the hook can compute; the YAML key `gae_form` chooses one.

A form defines what happens inside a turn, and what the previous turn sees of it: an entry value v, an entry advantage
a, and the decay from the turn's last token to a. Between turns every form is the same, with gamma_step and lambda_step:

    what reaches a turn's last token = gamma_step v' + gamma_step lambda_step a'      (' : the next turn's)

- `dual`: dual-discount GAE; see `advantage/maths/dual_gae.py`.
- `token`: one discount for all tokens of the episode: gamma_step and lambda_step apply inside turns too.
- `turn`: GAE over turns (as in turn-wise PPO). All tokens of a turn share its advantage and its return.
- `bi_level`: GAE over the turns' last tokens, then inside each turn from its last token back, with gamma_token and
  lambda_token (VAGEN, RAGEN). Here the reward of every token counts once, truncation is not termination, and a
  turn's last token is its last trained token.
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
    """One form's result inside turns; N tokens, T turns. Entries of turns without tokens are undefined."""

    advantages: Tensor
    """[N] advantages if nothing followed any turn."""
    decay: Tensor
    """[N] decay from the turn's last token to this token."""
    baseline: Tensor
    """[N] return minus advantage."""
    entry_value: Tensor
    """[T] the value from which the previous turn bootstraps."""
    entry_advantage: Tensor
    """[T] the advantage that the previous turn sees, if nothing followed this turn."""
    entry_decay: Tensor
    """[T] decay from the turn's last token to the entry advantage."""


def scan_dual(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """Dual-discount GAE inside turns."""
    lengths = packed.lengths
    advantages, _ = dual_discount_gae(
        values,
        rewards,
        lengths,
        packed.rewards,
        torch.full_like(lengths, -1),
        torch.zeros_like(packed.rewards),
        gamma_step=d.gamma_step,
        lambda_step=d.lambda_step,
        gamma_token=d.gamma_token,
        lambda_token=d.lambda_token,
    )
    decay = d.token_decay ** tokens_to_end(lengths).to(values.dtype)
    first = lengths.cumsum(0) - lengths
    return TurnScan(advantages, decay, values, *(_pick(x, first) for x in (values, advantages, decay)))


def scan_token(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """One discount for all tokens."""
    return scan_dual(values, rewards, packed, Discounts(d.gamma_step, d.lambda_step, d.gamma_step, d.lambda_step))


def scan_turn(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """The turn as one action: its reward is the sum over its tokens, its value that of its first token."""
    lengths = packed.lengths
    turn = token_turns(lengths)
    total = packed.rewards.index_add(0, turn, rewards)
    state = _pick(values, lengths.cumsum(0) - lengths)
    one = torch.ones_like(state)
    return TurnScan((total - state)[turn], one[turn], state[turn], state, total - state, one)


def scan_bi_level(values: Tensor, rewards: Tensor, packed: PackedTurns, d: Discounts) -> TurnScan:
    """Inside turns as `dual`, but the previous turn sees the last token's value, and the rewards before that token."""
    inside = scan_dual(values, rewards, packed, d)
    lengths = packed.lengths
    last = lengths.cumsum(0) - 1
    total = packed.rewards.new_zeros(len(lengths)).index_add(0, token_turns(lengths), rewards)
    before = total - _pick(rewards, last)
    return replace(
        inside,
        entry_value=before + _pick(values, last),
        entry_advantage=_pick(inside.advantages, last),
        entry_decay=torch.ones_like(before),
    )


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
    """The number of tokens after each packed token in its turn; [N]."""
    ends = lengths.cumsum(0) - 1
    return torch.repeat_interleave(ends, lengths) - torch.arange(int(lengths.sum()), device=lengths.device)


def _pick(x: Tensor, positions: Tensor) -> Tensor:
    """x at the positions; an arbitrary entry if a position is out of range (turns without tokens)."""
    return x[positions.clamp(0, len(x) - 1)] if len(x) else x.new_zeros(len(positions))
