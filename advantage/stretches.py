"""Credit between the stretches of a compacted conversation, as CompactionRL gives it (arXiv
2607.05378): a comparison.

A stretch ends with the turn in which the model writes its notes. Its last token is paid the rewards
of all later turns, and no value is read there, so GAE stays inside the stretch. The advantages then
shrink by gamma_token x lambda_token for each token of later stretches, with the lambda of that
token's turn. `gae_form: dual` goes on with the critic's value of the next prompt instead.

The paper rewards an episode once, at its end. Here, an earlier reward is paid to its own stretch
and to those before it, and an episode that the batch cuts is paid its bootstrap value in place of
the rewards that are missing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.exchange import NOTES
from advantage.gae import Discounts, Links, TurnScan, gather_next, solve_chain
from advantage.packing import PackedTurns


def stretch_columns(
    turns: PackedTurns, inside: TurnScan, discounts: Discounts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what all ranks must know of each turn to cut the chain at its notes; all [T] float64.

    These are: what the turn pays to earlier turns, its reward or a bootstrap state's value; the
    logarithm of its decay; and the share of an advantage at its last token that is left at its
    first.
    """
    pays = torch.where(turns.bootstrap, inside.entry_value, turns.rewards)
    decay = discounts.token_decay * torch.ones_like(pays)
    # Above 0, because 0 times the logarithm of 0 is not a number.
    log_decay = turns.lengths * decay.clamp_min(torch.finfo(torch.float64).tiny).log()
    return pays, log_decay * ~turns.bootstrap, inside.entry_decay


@dataclass(frozen=True)
class Stretches:
    """The turns of all ranks with their chain cut after each turn of notes; all [T]."""

    following: Tensor
    """The turn after each in the same stretch, an index or -1."""
    links: Links
    paid: Tensor
    """float64, what a stretch's last turn is paid for later turns; 0 for other turns."""
    scale: Tensor
    """float64, by how much the turn's advantages shrink."""

    def finish(
        self, inside: TurnScan, carry: Tensor, mine: slice, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a rank's advantages and returns [N]; `mine` are its turns among all, and `lengths`
        their tokens."""
        advantages, returns = inside.finish(carry + self.paid[mine].to(carry))
        scale = self.scale[mine].to(advantages)
        return advantages * torch.repeat_interleave(scale, lengths), returns


def cut_at_notes(
    following: Tensor, flags: Tensor, links: Links, pays: Tensor, log_decay: Tensor, reach: Tensor
) -> Stretches:
    """Cut the chain of turns, given what `stretch_columns` returned on each rank; all [T]."""
    writes = flags & NOTES > 0
    ones = torch.ones_like(pays)
    paid = gather_next(solve_chain(pays, ones, following), following) * writes
    later = gather_next(solve_chain(log_decay, ones, following), following)
    scale = solve_chain(later * writes, (~writes).double(), following).exp()
    paid_links = links._replace(a=links.a + reach * paid)
    return Stretches(torch.where(writes, -1, following), paid_links, paid, scale)
