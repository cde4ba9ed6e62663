"""The tutorial's environment keeps the contract, and leaves room between random play and its expert."""

from pathlib import Path
from typing import Any

import pytest

from envs.loading import build_env_from, load_env_module

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
FILE = str(EXAMPLES / "treasure.py")


def play(seed: int, choose: Any) -> dict[str, Any]:
    env = build_env_from(FILE, {"task": "treasure", "seed": seed}, {"max_steps": 20})
    env.reset()
    done, info = False, {}
    while not done:
        _, done, info = env.step(f"THINK: onwards\nACTION: {choose(env)}")
    return info


def test_the_expert_wins_every_episode() -> None:
    expert = load_env_module(FILE).expert_action
    assert all(play(seed, expert)["terminated"] for seed in range(100))


def test_the_same_seed_gives_the_same_episode_and_time_runs_out() -> None:
    lost = play(1, lambda env: "dance")
    assert (lost["truncated"], lost["terminated"], lost["valid_action"]) == (True, False, False)
    assert lost["executed_action"] == "go north" and lost["reward"] == pytest.approx(-0.1)
    first, second = (build_env_from(FILE, {"task": "treasure", "seed": 5}).reset() for _ in range(2))
    assert first == second
