"""Dual-discount GAE: one discount between the tokens of a turn, another between turns.

For token j of a turn with n tokens: V_j is the value of the prefix before the token, k_j the
token's reward, and r the turn's reward.

    d_j     = k_j + gamma_token V_{j+1} - V_j                               j < n-1
    d_{n-1} = k_{n-1} + r + gamma_step V(next turn's first token) - V_{n-1}
    A_j     = d_j + gamma_token lambda_token A_{j+1}                        j < n-1
    A_{n-1} = d_{n-1} + gamma_step lambda_step A(next turn's first token)

After a turn in which the environment did not move, because the model only wrote its notes, the last
two lines use gamma_token and lambda_token: `edges_of` has the discounts between turns.

`advantage/hook.py` calls the steps in order. `solve_inside` solves each turn as if nothing
followed. `links_of` says what a turn is worth to the one before it, and `solve_links` finds V and A
of the next turn's first token. `TurnScan.finish` adds them, discounted, to every token. All sums
are float64, and nothing is divided by a power of a discount, so any discount and any length of turn
are safe. A turn of length 0 counts as one step whose value is r + gamma_step V', so its error is 0.

N tokens, T turns; the tokens of a turn are adjacent, and turns are in index order.

Sources: Verlog's paper, appendix B.3; GAE: Schulman et al. 2016. docs/algorithms.md compares the
other forms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.errors import FlagError
from advantage.loading import load_function
from advantage.settings import AdvantageSettings
from slime_verlog import ConfigError


@dataclass(frozen=True)
class Discounts:
    """The four discounts, each in [0, 1]."""

    gamma_step: float
    lambda_step: float
    gamma_token: float
    lambda_token: float | Tensor
    """One number, or one per turn [T] (`lambda_policy: length_adaptive`)."""

    @property
    def token_decay(self) -> float | Tensor:
        return self.gamma_token * self.lambda_token

    @property
    def step_decay(self) -> float:
        return self.gamma_step * self.lambda_step


def discounts_of(
    settings: AdvantageSettings, role: str | None, lengths: Tensor | None = None
) -> Discounts:
    """Return the discounts of the actor or the critic; raises FlagError if they differ and `role`
    is None.

    `lengths` [T] are the turns' tokens; those that are not trained count only in a turn without
    trained ones. Without them, `lambda_token` is that of `lambda_policy: fixed`.
    """
    if role is None and (settings.lambda_critic is not None or settings.lambda_policy != "fixed"):
        raise FlagError(
            "lambda_critic and lambda_policy differ between actor and critic, and only "
            "advantage.patch.install notes which of them a process trains: give "
            "--custom-megatron-init-path advantage.patch.install"
        )
    between = settings.lambda_step
    inside: float | Tensor = settings.lambda_token
    if settings.value_pretraining.batches:
        between = inside = 1.0
    elif role == "critic" and settings.lambda_critic is not None:
        between = inside = settings.lambda_critic
    if lengths is not None and role != "critic" and settings.lambda_policy == "length_adaptive":
        inside = (1 - 1 / (settings.lambda_policy_alpha * lengths.double())).clamp(0, 1)
    return Discounts(settings.gamma_step, between, settings.gamma_token, inside)


@dataclass(frozen=True)
class TurnScan:
    """One form's result inside turns; N tokens, T turns. No entry of a turn without tokens is
    used."""

    entry_value: Tensor
    """[T] the value from which the previous turn bootstraps."""
    entry_advantage: Tensor
    """[T] the advantage that the previous turn sees, if nothing followed this turn."""
    entry_decay: Tensor
    """[T] decay from the turn's last token to the entry advantage."""
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Advantages and returns [N] in the values' dtype, from what reaches each turn's last token
    [T]."""


Form = Callable[[Tensor, Tensor | None, Tensor, Tensor, Discounts], TurnScan]
"""A form of GAE inside turns; the arguments are those of `solve_inside` up to the discounts."""


def solve_inside(
    values: Tensor,
    rewards: Tensor | None,
    lengths: Tensor,
    turn_rewards: Tensor,
    discounts: Discounts,
    form: str = "dual",
) -> TurnScan:
    """Solve each turn as if nothing followed it.

    Args:
        values: [N] floating, the value of the prefix before each token.
        rewards: [N], the reward of each token, such as -kl_coef x KL; None if they are all 0.
        lengths: [T] int64, tokens of each turn; they sum to N.
        turn_rewards: [T] float64, given at each turn's last token.
        form: a value of `AdvantageSettings.gae_form`.
    """
    return find_form(form)(values, rewards, lengths, turn_rewards, discounts)


@dataclass(frozen=True)
class Edges:
    """Discounts from each turn to the next, [T] float64."""

    gamma: Tensor
    decay: Tensor
    """gamma times lambda"""

    def carry(self, next_value: Tensor, next_advantage: Tensor) -> Tensor:
        """What reaches each turn's last token from what follows, [T]: 0 if nothing does."""
        device = self.gamma.device
        return self.gamma * next_value.to(device) + self.decay * next_advantage.to(device)


def edges_of(moves: Tensor, discounts: Discounts, form: str = "dual") -> Edges:
    """Return the discounts of a step if the environment `moves` [T] after the turn, else those
    between tokens.

    The form `token` has one discount for all tokens.
    """
    steps = moves | (form == "token")
    ones = torch.ones_like(moves, dtype=torch.float64)
    gamma = torch.where(steps, discounts.gamma_step * ones, discounts.gamma_token * ones)
    decay = torch.where(steps, discounts.step_decay * ones, discounts.token_decay * ones)
    return Edges(gamma, decay)


class Links(NamedTuple):
    """How a turn's first token looks to the turn before it, all [T] float64.

    V is that token's value, A its advantage; V' and A' are those of the turn that follows. These
    are not known yet, so each is kept as a linear form: V = v + w V' and A = a + p V' + q A'.
    """

    v: Tensor
    w: Tensor
    a: Tensor
    p: Tensor
    q: Tensor

    def solved(self, next_value: Tensor, next_advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Each turn's own V and A, [T], from those of the turn that follows."""
        return self.v + self.w * next_value, self.a + self.p * next_value + self.q * next_advantage


def links_of(
    inside: TurnScan, lengths: Tensor, turn_rewards: Tensor, bootstrap: Tensor, edges: Edges
) -> Links:
    """Show each turn as the one before it sees it.

    An empty turn passes on everything that follows it. Where `bootstrap` [T], the entry is not a
    turn but the state after a cut episode: its value counts, and nothing that follows.
    """
    empty = lengths == 0
    decay = torch.where(empty, 1.0, inside.entry_decay) * ~bootstrap
    return Links(
        v=torch.where(empty, turn_rewards, inside.entry_value),
        w=edges.gamma * empty,
        a=torch.where(empty | bootstrap, 0.0, inside.entry_advantage),
        p=edges.gamma * decay * ~empty,
        q=edges.decay * decay,
    )


def solve_links(links: Links, following: Tensor) -> tuple[Tensor, Tensor]:
    """Find V' and A' of each turn from `following`, the index of the turn that follows it, or -1;
    all [T]."""
    value = solve_chain(links.v, links.w, following)
    next_value = gather_next(value, following)
    advantage = solve_chain(links.a + links.p * next_value, links.q, following)
    return next_value, gather_next(advantage, following)


def scan_turns(
    values: Tensor,
    rewards: Tensor | None,
    lengths: Tensor,
    turn_rewards: Tensor,
    gamma: float,
    decay: float | Tensor,
) -> TurnScan:
    """Solve GAE inside turns; `decay` is gamma times lambda, one number or [T] float64."""
    turn = torch.repeat_interleave(lengths)
    last = lengths.cumsum(0) - 1
    first = last - lengths + 1
    to_last = last[turn] - torch.arange(len(values), device=values.device)
    is_last = to_last == 0

    next_value = torch.where(is_last, 0.0, values.double().roll(-1))
    deltas = gamma * next_value - values
    if rewards is not None:
        deltas += rewards
    deltas += torch.where(is_last, turn_rewards[turn], 0.0)

    decay_of_turn = torch.zeros_like(turn_rewards) + decay
    decay_of_token = decay_of_turn[turn]
    longest = int(lengths.max()) if len(lengths) else 0
    alone = solve_runs(deltas, torch.where(is_last, 0.0, decay_of_token), longest)
    reach = decay_of_token ** to_last.double()

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + reach * carry[turn]
        returns = advantages + values
        return advantages.to(values.dtype), returns.to(values.dtype)

    return TurnScan(pick(values, first), pick(alone, first), pick(reach, first), finish)


def scan_dual(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Discount inside turns with `gamma_token` and `lambda_token`."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_token, d.token_decay)


def scan_token(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Discount all tokens alike, with the discounts between turns."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_step, d.step_decay)


def scan_turn(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Take the turn as one action: its reward is the sum over its tokens, its value that of its
    first token."""
    turn = torch.repeat_interleave(lengths)
    state = pick(values, lengths.cumsum(0) - lengths)
    alone = turn_rewards + _totals(rewards, turn, state) - state

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + carry
        returns = advantages + state
        return advantages[turn].to(values.dtype), returns[turn].to(values.dtype)

    return TurnScan(state, alone, torch.ones_like(state), finish)


def scan_bi_level(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Work inside turns as `dual`, but show the previous turn the last token's value and the
    rewards before it."""
    inside = scan_turns(values, rewards, lengths, turn_rewards, d.gamma_token, d.token_decay)
    last = lengths.cumsum(0) - 1
    state = pick(values, last)
    own = pick(rewards, last) if rewards is not None else torch.zeros_like(state)
    before = _totals(rewards, torch.repeat_interleave(lengths), state) - own
    return TurnScan(
        before + state, own + turn_rewards - state, torch.ones_like(state), inside.finish
    )


FORMS: Mapping[str, Form] = {
    "dual": scan_dual,
    "token": scan_token,
    "turn": scan_turn,
    "bi_level": scan_bi_level,
    "compaction": scan_dual,  # differs between stretches alone: advantage/stretches.py
}


def find_form(form: str) -> Form:
    """Return the function of a `gae_form`; raises ConfigError if an import path leads to none."""
    return FORMS[form] if form in FORMS else load_function(form, "gae_form")


def check_form(form: str) -> None:
    """Try a `gae_form` on two turns; raises ConfigError if it cannot be found, fails, or returns
    other shapes."""
    values = torch.tensor([0.5, 0.75, 0.25])
    lengths = torch.tensor([2, 1])
    turn_rewards = torch.tensor([0.0, 1.0])
    function = find_form(form)
    discounts = Discounts(0.99, 0.95, 1.0, 1.0)
    for rewards in (None, torch.zeros(3)):
        try:
            inside = function(values, rewards, lengths, turn_rewards.double(), discounts)
            per_turn = [inside.entry_value, inside.entry_advantage, inside.entry_decay]
            per_token = inside.finish(torch.zeros(2, dtype=torch.float64))
            shapes = [tuple(x.shape) for x in (*per_turn, *per_token)]
        except Exception as error:  # of somebody else's function
            raise ConfigError(
                f"gae_form: {form} fails on two turns: {type(error).__name__}: {error}"
            ) from error
        if shapes != [(2,), (2,), (2,), (3,), (3,)]:
            raise ConfigError(
                f"gae_form: {form} must return a TurnScan with one entry per turn, whose `finish` "
                "gives advantages and returns per token; for two turns of three tokens, the "
                f"shapes are {shapes}"
            )


def _totals(rewards: Tensor | None, turn: Tensor, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    return total if rewards is None else total.index_add_(0, turn, rewards.double())


def pick(x: Tensor, positions: Tensor) -> Tensor:
    """x at the positions, [T] float64; an arbitrary entry if a position is out of range (turns
    without tokens)."""
    if not len(x):
        return x.new_zeros(len(positions)).double()
    return x[positions.clamp(0, len(x) - 1)].double()


def solve_chain(a: Tensor, b: Tensor, following: Tensor) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[following[i]]; a `following` of -1 ends a chain. All [n], no
    cycles."""
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
    """Solve x[i] = a[i] + b[i] x[i + 1] in place of `a`; of every `longest` adjacent b, at least
    one is 0. All [n].

    After k rounds, each entry holds the sum over its next 2^k entries, so a run takes log2 of its
    length in rounds.
    """
    step = 1
    while step < min(longest, len(a)):
        a[:-step] += b[:-step] * a[step:]
        b = F.pad(b[:-step] * b[step:], (0, step))
        step *= 2
    return a


def gather_next(x: Tensor, following: Tensor) -> Tensor:
    """Pick x[following], or 0 if nothing follows; all [T]."""
    return torch.where(following >= 0, x[following.clamp(min=0)], 0.0) if len(x) else x
