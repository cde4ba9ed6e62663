"""How much of the variance of returns the state explains, which is the most that a critic can, and the time alone.

    python -m benchmarks.explainable custom_configs/crafter.yaml --set env.max_steps=100

Copies of an episode go on from the same state with the player of the demonstrations: the scripted expert, with random
actions in between. Discounted returns vary between states and within one; the share of the first part is printed, with
a 90 % bootstrap interval, and the share that a parabola in the turn's number explains.
"""

import argparse
import copy
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.loading import load_env_module
from rollout.bridge.settings import check_keys, with_assignments
from rollout.tasks import make_episode, pick_task, read_tasks
from slime_verlog import ConfigError, command, read_yaml_mapping


def shares(returns: np.ndarray, turns: np.ndarray) -> tuple[float, float]:
    """Return the shares of the variance of `returns` [states, copies] that state and turn [states] explain."""
    fitted, total = np.polyval(np.polyfit(turns, returns.mean(1), 2), turns), returns.var(ddof=1)
    return float(1 - returns.var(1, ddof=1).mean() / total), float(fitted.var() / total)


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a YAML key")
    parser.add_argument("--states", type=int, default=200)
    parser.add_argument("--copies", type=int, default=8, help="of each state")
    parser.add_argument("--random-share", type=float, default=0.85, help="of random actions")
    given = parser.parse_args(arguments)
    settings = check_keys(with_assignments(read_yaml_mapping(given.config, "YAML"), given.set, "--set"))
    tasks, rng, gamma = read_tasks(settings), random.Random(0), settings.gamma_step
    reach = math.log(0.02) / math.log(gamma) if gamma < 1 else math.inf  # turns that matter to a return
    found: list[tuple[int, list[float]]] = []

    def play(env: Any) -> tuple[Any, bool, Any]:
        action = rng.choice(list(env.actions)) if rng.random() < given.random_share else expert(env)
        return env.step(f"ACTION: {action}")

    for number in itertools.count():
        spec = make_episode(settings, pick_task(tasks, 0, number), number, settings.seed_start + number)
        expert, env = getattr(load_env_module(spec.env.env_path), "expert_action", None), spec.env.build()
        if expert is None or not env.actions:
            raise ConfigError(f"{spec.env.env_path} must have expert_action(env) and a list of actions")
        env.reset()
        first = rng.randrange(min(settings.max_turns or math.inf, env.max_steps or 100))
        if any(play(env)[1] for _ in range(first)):
            continue  # it ended before
        found.append((first, [0.0] * given.copies))
        for i in range(given.copies):
            now, turn, done = copy.deepcopy(env), first, False
            while not done and turn < min(settings.max_turns or math.inf, first + reach):
                _, done, info = play(now)
                found[-1][1][i] += gamma ** (turn - first) * info["reward"]
                turn += 1
        if len(found) == given.states:
            break
    turns, returns = (np.array(part, dtype=float) for part in zip(*found, strict=True))
    draws = np.random.default_rng(0).integers(0, len(found), (500, len(found)))
    low, high = np.percentile([shares(returns[draw], turns[draw])[0] for draw in draws], [5, 95])
    state, time = shares(returns, turns)
    print(f"{len(found)} states: the state explains {state:.2f} [{low:.2f}, {high:.2f}], the turn's number {time:.2f}")


if __name__ == "__main__":
    main()
