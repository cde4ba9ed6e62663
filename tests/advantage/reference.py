"""The definition of dual-discount GAE, token by token in float64, as simple as possible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """What a turn's advantages follow from; without tokens, it is worth its reward and what follows
    it."""

    values: Sequence[float]
    token_rewards: Sequence[float]
    reward: float
    following: Any = None
    """The key of the episode's next turn, which comes later in the order of keys; None without
    one."""
    bootstrap: float = 0.0
    """The value of what follows if no turn does."""
    moves: bool = True
    """Otherwise the discounts to the next turn are those between tokens."""


def brute_force(
    turns: Mapping[Any, Turn],
    *,
    gamma_step: float,
    lambda_step: float,
    gamma_token: float,
    lambda_token: float | Callable[[int], float],
) -> dict[Any, list[float]]:
    """Advantages of every turn's tokens. `lambda_token` may be a function of the number of the
    turn's tokens."""
    advantages: dict[Any, list[float]] = {}
    first: dict[Any, tuple[float, float]] = {}
    for key in sorted(turns, reverse=True):
        turn = turns[key]
        inside = lambda_token(len(turn.values)) if callable(lambda_token) else lambda_token
        gamma, trace = (gamma_step, lambda_step) if turn.moves else (gamma_token, inside)
        reward = turn.reward
        value, advantage = first.get(turn.following, (turn.bootstrap, 0.0))
        row: list[float] = []
        for own, of_token in zip(reversed(turn.values), reversed(turn.token_rewards), strict=True):
            delta = of_token + reward + gamma * value - own
            value, advantage = own, delta + gamma * trace * advantage
            row.insert(0, advantage)
            gamma, trace, reward = gamma_token, inside, 0.0
        if not row:
            value, advantage = reward + gamma * value, gamma * trace * advantage
        first[key], advantages[key] = (value, advantage), row
    return advantages
