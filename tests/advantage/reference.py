"""The definition of dual-discount GAE, token by token in float64, as simple as possible."""

from collections.abc import Callable, Sequence


def brute_force(
    values: Sequence[float],
    token_rewards: Sequence[float],
    turn_lengths: Sequence[int],
    turn_rewards: Sequence[float],
    next_turn: Sequence[int],
    bootstrap_values: Sequence[float],
    *,
    gamma_step: float,
    lambda_step: float,
    gamma_token: float,
    lambda_token: float | Callable[[int], float],
    moves: Sequence[bool] | None = None,
) -> list[float]:
    """Advantages of all tokens; an empty turn is worth its reward and what follows it.

    `lambda_token` may be a function of the number of the turn's tokens. After a turn that did not move, the discounts
    to the next turn are those between tokens.
    """
    starts = [sum(turn_lengths[:t]) for t in range(len(turn_lengths))]
    advantages = [0.0] * len(values)
    first: dict[int, tuple[float, float]] = {}
    for head in sorted(set(range(len(turn_lengths))) - set(next_turn)):
        episode = [head]
        while next_turn[episode[-1]] >= 0:
            episode.append(next_turn[episode[-1]])
        for t in reversed(episode):
            v_after, a_after = first.get(next_turn[t], (bootstrap_values[t], 0.0))
            if next_turn[t] < 0:
                v_after, a_after = bootstrap_values[t], 0.0
            n = turn_lengths[t]
            inside = lambda_token(n) if callable(lambda_token) else lambda_token
            moved = moves is None or moves[t]
            gamma, decay = (gamma_step, gamma_step * lambda_step) if moved else (gamma_token, gamma_token * inside)
            a = decay * a_after
            v = turn_rewards[t] + gamma * v_after
            for j in reversed(range(n)):
                i = starts[t] + j
                if j == n - 1:
                    delta = token_rewards[i] + turn_rewards[t] + gamma * v_after - values[i]
                    a = delta + decay * a_after
                else:
                    delta = token_rewards[i] + gamma_token * values[i + 1] - values[i]
                    a = delta + gamma_token * inside * a
                v = values[i]
                advantages[i] = a
            first[t] = (v, a)
    return advantages
