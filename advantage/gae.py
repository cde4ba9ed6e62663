"""Dual-discount GAE: one discount between the tokens of a turn, another between turns.

For token j of a turn with n tokens: V_j is the value of the prefix before the token, k_j the token's reward, and r the
turn's reward.

    d_j     = k_j + gamma_token V_{j+1} - V_j                               j < n-1
    d_{n-1} = k_{n-1} + r + gamma_step V(next turn's first token) - V_{n-1}
    A_j     = d_j + gamma_token lambda_token A_{j+1}                        j < n-1
    A_{n-1} = d_{n-1} + gamma_step lambda_step A(next turn's first token)

After a turn in which the environment did not move, because the model only wrote its notes, the last two lines use
gamma_token and lambda_token: `edges` has the discounts between turns.

`dual_discount_gae` solves this inside each turn as if nothing followed (`advantage/scan.py`), finds V and A of the next
turn's first token (`Links`, `advantage/exchange.py`), and adds them, discounted, to every token. All sums are float64,
and nothing is divided by a power of a discount, so any discount and any length of turn are safe.

Sources: Verlog's paper, appendix B.3; GAE: Schulman et al. 2016. docs/algorithms.md compares the other forms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.errors import FlagError
from advantage.loading import load_function
from advantage.scan import TurnScan, gather_next, pick, scan_turns, solve_chain
from advantage.settings import AdvantageSettings
from slime_verlog import ConfigError


@dataclass(frozen=True)
class Discounts:
    """The four discounts, each in [0, 1]."""

    gamma_step: float
    lambda_step: float
    gamma_token: float
    lambda_token: float

    @property
    def token_decay(self) -> float:
        return self.gamma_token * self.lambda_token

    @property
    def step_decay(self) -> float:
        return self.gamma_step * self.lambda_step


Form = Callable[[Tensor, Tensor | None, Tensor, Tensor, Discounts], TurnScan]
"""A form of GAE inside turns, from values [N], token rewards [N] (None: all 0), lengths [T], turn rewards [T] and the
discounts; arguments as in `dual_discount_gae`."""


def discounts_of(settings: AdvantageSettings, role: str | None) -> Discounts:
    """Return the discounts of the actor or the critic; raises FlagError if they differ and `role` is None."""
    if role is None and (settings.lambda_critic is not None or settings.lambda_policy != "fixed"):
        raise FlagError(
            "lambda_critic and lambda_policy differ between actor and critic, and only advantage.patch.install notes "
            "which of them a process trains: give --custom-megatron-init-path advantage.patch.install"
        )
    lambdas = settings.lambda_step, settings.lambda_token
    if settings.value_pretraining.batches:
        lambdas = 1.0, 1.0
    elif role == "critic" and settings.lambda_critic is not None:
        lambdas = settings.lambda_critic, settings.lambda_critic
    return Discounts(settings.gamma_step, lambdas[0], settings.gamma_token, lambdas[1])


def token_lambdas(settings: AdvantageSettings, role: str | None, lengths: Tensor) -> Tensor | None:
    """Compute the lambda inside each turn, [T] float64, from its tokens [T]; None for `lambda_token`.

    Tokens that are not trained count only in a turn without trained ones.
    """
    if role == "critic" or settings.lambda_policy == "fixed":
        return None
    return (1 - 1 / (settings.lambda_policy_alpha * lengths.double())).clamp(0, 1)


@dataclass(frozen=True)
class Links:
    """How a turn's first token looks to the turn before it, all [T] float64.

    V is that token's value, A its advantage; V' and A' are those of the turn that follows. These are not known yet, so
    each is kept as a linear form: V = v + w V' and A = a + p V' + q A'.
    """

    v: Tensor
    w: Tensor
    a: Tensor
    p: Tensor
    q: Tensor


@torch.no_grad()
def dual_discount_gae(
    values: Tensor,
    token_rewards: Tensor | None,
    lengths: Tensor,
    turn_rewards: Tensor,
    bootstrap: Tensor,
    moves: Tensor,
    discounts: Discounts,
    follow: Callable[[Links], tuple[Tensor, Tensor]],
    *,
    form: str = "dual",
    lambdas: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of all tokens of all turns.

    N tokens, T turns; the tokens of a turn are adjacent, and turns are in index order. A turn of length 0 counts as one
    step whose value is r + gamma_step V', so its error is 0.

    Args:
        values: [N] floating, the value of the prefix before each token.
        token_rewards: [N], the reward of each token, such as -kl_coef x KL; None if they are all 0.
        lengths: [T] int64, tokens of each turn; they sum to N.
        turn_rewards: [T] float64, given at each turn's last token.
        bootstrap: [T] bool, whether the entry is not a turn but the state after a cut episode: only its value counts.
        moves: [T] bool, whether the environment moved after the turn.
        follow: finds V' and A' of each turn, both [T] float64; 0 if nothing follows.
        form: a value of `AdvantageSettings.gae_form`.
        lambdas: [T] float64, the lambda inside each turn instead of `discounts.lambda_token`; for the form `dual`.

    Returns:
        advantages [N] and returns (advantages + values) [N], in `values`' dtype, on its device.

    Example: an episode of two turns with two tokens and one, in one process.

        following = torch.tensor([1, -1])
        advantages, returns = dual_discount_gae(
            values=torch.tensor([0.5, 0.75, 0.25]), token_rewards=None, lengths=torch.tensor([2, 1]),
            turn_rewards=torch.tensor([0.0, 1.0]).double(), bootstrap=torch.zeros(2, dtype=torch.bool),
            discounts=Discounts(gamma_step=0.99, lambda_step=0.95, gamma_token=1.0, lambda_token=1.0),
            moves=torch.ones(2, dtype=torch.bool), follow=lambda links: solve_links(links, following),
        )
    """
    if lambdas is not None:
        gamma = discounts.gamma_token
        inside = scan_turns(values, token_rewards, lengths, turn_rewards, gamma, gamma * lambdas)
    else:
        inside = find_form(form)(values, token_rewards, lengths, turn_rewards, discounts)
    gamma, decay = edges(moves | (form == "token"), discounts, lambdas)  # `token` has one discount for all tokens
    next_value, next_advantage = follow(_links(inside, lengths, turn_rewards, bootstrap, gamma, decay))
    carry = gamma * next_value.to(gamma.device) + decay * next_advantage.to(gamma.device)
    return inside.finish(carry.to(values.device))


def edges(moves: Tensor, d: Discounts, lambdas: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Discounts from each turn to the next: gamma, and gamma times lambda; both [T] float64.

    They are those of a step only if the environment `moves` [T] after the turn, else those between tokens. `lambdas`
    [T] replaces `lambda_token`.
    """
    step = torch.ones_like(moves, dtype=torch.float64)
    token_decay = d.token_decay * step if lambdas is None else d.gamma_token * lambdas
    gamma = torch.where(moves, d.gamma_step * step, d.gamma_token * step)
    return gamma, torch.where(moves, d.step_decay * step, token_decay)


def _links(
    inside: TurnScan, lengths: Tensor, turn_rewards: Tensor, bootstrap: Tensor, edge_gamma: Tensor, edge_decay: Tensor
) -> Links:
    """An empty turn passes on everything that follows it, a bootstrap state nothing."""
    empty = lengths == 0
    decay = torch.where(empty, 1.0, inside.entry_decay) * ~bootstrap
    return Links(
        v=torch.where(empty, turn_rewards, inside.entry_value),
        w=edge_gamma * empty,
        a=torch.where(empty | bootstrap, 0.0, inside.entry_advantage),
        p=edge_gamma * decay * ~empty,
        q=edge_decay * decay,
    )


def solve_links(links: Links, following: Tensor) -> tuple[Tensor, Tensor]:
    """Find V' and A' of each turn from `following`, the index of the turn that follows it, or -1; all [T]."""
    nothing = torch.zeros_like(links.v)
    next_value = gather_next(solve_chain(links.v, links.w, following), following, nothing)
    advantage = solve_chain(links.a + links.p * next_value, links.q, following)
    return next_value, gather_next(advantage, following, nothing)


def scan_dual(values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts) -> TurnScan:
    """Discount inside turns with `gamma_token` and `lambda_token`."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_token, d.token_decay)


def scan_token(values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts) -> TurnScan:
    """Discount all tokens alike, with the discounts between turns."""
    return scan_turns(values, rewards, lengths, turn_rewards, d.gamma_step, d.step_decay)


def scan_turn(values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts) -> TurnScan:
    """Take the turn as one action: its reward is the sum over its tokens, its value that of its first token."""
    turn = torch.repeat_interleave(lengths)
    state = pick(values, lengths.cumsum(0) - lengths)
    alone = turn_rewards + _totals(rewards, turn, state) - state

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + carry
        return advantages[turn].to(values.dtype), (advantages + state)[turn].to(values.dtype)

    return TurnScan(state, alone, torch.ones_like(state), finish)


def scan_bi_level(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, d: Discounts
) -> TurnScan:
    """Work inside turns as `dual`, but show the previous turn the last token's value and the rewards before it."""
    inside = scan_turns(values, rewards, lengths, turn_rewards, d.gamma_token, d.token_decay)
    last = lengths.cumsum(0) - 1
    state = pick(values, last)
    own = pick(rewards, last) if rewards is not None else torch.zeros_like(state)
    before = _totals(rewards, torch.repeat_interleave(lengths), state) - own
    return TurnScan(before + state, own + turn_rewards - state, torch.ones_like(state), inside.finish)


FORMS: Mapping[str, Form] = {
    "dual": scan_dual,
    "token": scan_token,
    "turn": scan_turn,
    "bi_level": scan_bi_level,
}


def find_form(form: str) -> Form:
    """Return the function of a `gae_form`; raises ConfigError if an import path leads to none."""
    return FORMS[form] if form in FORMS else load_function(form, "gae_form")


def check_form(form: str) -> None:
    """Try a `gae_form` on two turns; raises ConfigError if it cannot be found, fails, or returns other shapes."""
    values, lengths, turn_rewards = torch.tensor([0.5, 0.75, 0.25]), torch.tensor([2, 1]), torch.tensor([0.0, 1.0])
    function, discounts = find_form(form), Discounts(0.99, 0.95, 1.0, 1.0)
    for rewards in (None, torch.zeros(3)):
        try:
            inside = function(values, rewards, lengths, turn_rewards.double(), discounts)
            per_turn = [inside.entry_value, inside.entry_advantage, inside.entry_decay]
            per_token = inside.finish(torch.zeros(2, dtype=torch.float64))
            shapes = [tuple(x.shape) for x in (*per_turn, *per_token)]
        except Exception as error:  # of somebody else's function
            raise ConfigError(f"gae_form: {form} fails on two turns: {type(error).__name__}: {error}") from error
        if shapes != [(2,), (2,), (2,), (3,), (3,)]:
            raise ConfigError(
                f"gae_form: {form} must return a TurnScan with one entry per turn, whose `finish` gives advantages and "
                f"returns per token; for two turns of three tokens, the shapes are {shapes}"
            )


def _totals(rewards: Tensor | None, turn: Tensor, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    return total if rewards is None else total.index_add_(0, turn, rewards.double())
