"""Estimators without a critic, as pure functions of whole episodes: GRPO, RLOO, GiGPO, G2PO, GAGPO
and branches.

Everything is compared inside a group, the episodes with the same task and seed. G_t is the return
from turn t onwards; a state is a prompt, and V(s) the mean of G_t over all turns of the group in
state s. Nothing follows an episode's last turn, whether it terminated or was truncated.
docs/group_estimators.md has the sources.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from advantage.gae import Edges, gather_next, solve_chain
from advantage.settings import AdvantageSettings


@dataclass(frozen=True)
class Episodes:
    """T turns of whole episodes; the turns of an episode are adjacent and in order. All [T]."""

    episode: Tensor
    """int64, 0 for the first episode, 1 for the second, ..."""
    group: Tensor
    """int64, at least 0."""
    state: Tensor
    """int64, at least 0: equal for turns of a group with equal prompts; a turn without an anchor
    has its own state."""
    reward: Tensor
    """float64"""
    edges: Edges
    baseline: Tensor
    """float64, mean return of continuations from before the turn; only `branches` reads it."""

    @cached_property
    def first(self) -> Tensor:
        """Whether a turn is its episode's first, [T]."""
        is_first = torch.ones_like(self.episode, dtype=torch.bool)
        is_first[1:] = self.episode[1:] != self.episode[:-1]
        return is_first

    @cached_property
    def following(self) -> Tensor:
        """Index of the episode's next turn, -1 at its end, [T]."""
        following = torch.arange(1, len(self.episode) + 1)
        is_last = self.first.roll(-1)
        following[is_last] = -1
        return following

    @cached_property
    def to_go(self) -> Tensor:
        """G_t, [T]."""
        return solve_chain(self.reward, self.edges.gamma, self.following)

    @cached_property
    def plain_returns(self) -> Tensor:
        """Sum of an episode's rewards, one entry per episode."""
        totals = self.reward.new_zeros(int(self.first.sum()))
        return totals.index_add(0, self.episode, self.reward)

    def shared_states(self) -> float:
        """Compute the share of turns whose state another turn of the group was in; 0 without
        turns."""
        if not len(self.state):
            return 0.0
        count, _, _ = statistics(self.to_go, self.state)
        return float((count > 1).double().mean())


def grpo(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compare episodes by their discounted returns."""
    returns = turns.to_go[turns.first]
    return relative(returns, turns.group[turns.first], normalize)[turns.episode]


def rloo(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compare each episode's discounted return with the mean of the others; nothing is
    normalised."""
    returns = turns.to_go[turns.first]
    count, mean, _ = statistics(returns, turns.group[turns.first])
    # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
    scores = (returns - mean) * count / (count - 1).clamp(min=1)
    return scores[turns.episode]


def gigpo(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compare episodes, and turns in the same state by G_t. A state seen once adds 0."""
    discounted = settings.gigpo_discount == "both"
    returns = turns.to_go[turns.first] if discounted else turns.plain_returns
    of_episodes = relative(returns, turns.group[turns.first], normalize)[turns.episode]
    of_turns = relative(turns.to_go, turns.state, normalize)
    return of_episodes + settings.gigpo_step_weight * of_turns


def g2po(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compare episodes, the states that turns reach from the same state, and what every turn of the
    group gains.

    Two rules are the authors': every turn of a group counts in the comparison of episodes, so long
    ones weigh more; and V has one discount more than the mean of G_t. A turn's gain is r_t +
    V(s_t+1) - V(s_t).
    """
    of_episodes = relative(turns.plain_returns[turns.episode], turns.group, normalize)
    _, mean, _ = statistics(turns.to_go, turns.state)
    value = settings.gamma_step * mean
    reached = turns.reward + gather_next(value, turns.following)
    of_choices = relative(reached, turns.state, normalize)
    of_gains = relative(reached - value, turns.group, normalize)
    return of_episodes + settings.gigpo_step_weight * (of_choices + of_gains)


def gagpo(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compute GAE over turns with V in place of a critic, and compare it inside the group.

    The paper's equations were not available. This reading is inferred, and gamma and lambda are
    used as in two ports. In a state seen once, V is that turn's G_t, so the turn's own error is 0
    if the next state was seen once, too.
    """
    _, value, _ = statistics(turns.to_go, turns.state)
    error = turns.reward + turns.edges.gamma * gather_next(value, turns.following) - value
    advantage = solve_chain(error, turns.edges.decay, turns.following)
    return relative(advantage, turns.group, normalize)


def branches(turns: Episodes, settings: AdvantageSettings, normalize: bool) -> Tensor:
    """Compare G_t with the mean return of continuations from the same state, played for this
    alone."""
    return turns.to_go - turns.baseline


Estimator = Callable[[Episodes, AdvantageSettings, bool], Tensor]
"""Takes turns, settings, and whether to divide by standard deviations; returns one advantage per
turn, [T] float64."""

ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "gigpo": gigpo,
    "g2po": g2po,
    "gagpo": gagpo,
    "branches": branches,
}
"""The values of `group_estimator`."""


def relative(x: Tensor, groups: Tensor, normalize: bool) -> Tensor:
    """Subtract its group's mean from each entry, optionally divide by the standard deviation; 0 for
    a group of one."""
    count, mean, deviation = statistics(x, groups)
    scale = deviation + 1e-6 if normalize else torch.ones_like(x)
    return torch.where(count > 1, (x - mean) / scale, 0.0)


def statistics(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and standard deviation (n - 1) of each entry's group; `groups` are int64, at
    least 0. All [n]."""
    n = int(groups.max()) + 1 if len(groups) else 0

    def total(y: Tensor) -> Tensor:
        sums = torch.zeros(n, dtype=torch.float64)
        return sums.index_add_(0, groups, y)[groups]

    count = total(torch.ones_like(x))
    mean = total(x) / count
    variance = total((x - mean) ** 2) / (count - 1).clamp(min=1)
    return count, mean, variance.sqrt()
