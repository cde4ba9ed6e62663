"""GAE inside turns with another lambda per turn; `scan.py` is several times faster and has one lambda for all turns.

Every token is a link of a chain, A_j = d_j + gamma lambda A_{j+1}, which doubling solves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from advantage.maths.chain import solve_runs
from advantage.scan import TokenRewards, TurnScan


def scan_turns_by_decay(
    values: Tensor, rewards: TokenRewards | None, lengths: Tensor, turn_rewards: Tensor, gamma: float, lambdas: Tensor
) -> TurnScan:
    """GAE inside turns; arguments and result as in `scan_turns`, but `lambdas` has one entry per turn, [T]."""
    turn = torch.repeat_interleave(lengths)
    last = lengths.cumsum(0) - 1
    place = torch.arange(len(values), device=values.device)
    is_last = place == last[turn]
    deltas = gamma * torch.where(is_last, 0.0, values.double().roll(-1)) - values
    if rewards is not None:
        deltas += rewards.total()
    deltas += torch.where(is_last, turn_rewards[turn], 0.0)
    decay = gamma * lambdas
    longest = int(lengths.max()) if len(lengths) else 0
    alone = solve_runs(deltas, torch.where(is_last, 0.0, decay[turn]), longest)
    reach = decay[turn] ** (last[turn] - place).double()

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + reach * carry[turn]
        return advantages.to(values.dtype), (advantages + values).to(values.dtype)

    nonempty = (lengths > 0).nonzero()[:, 0]
    first = (last - lengths + 1)[nonempty]

    def per_turn(x: Tensor) -> Tensor:
        return turn_rewards.new_zeros(len(lengths)).index_copy_(0, nonempty, x)

    return TurnScan(per_turn(values[first].double()), per_turn(alone[first]), per_turn(reach[first]), finish)
