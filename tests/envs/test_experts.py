"""Scripted players win the games that they are written for, also if their advice is not always
taken."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from envs.babaisai.levels import TASKS as BABAISAI
from envs.loading import load_env_module
from tests.envs.contract import Case

BABYAI = ("goto", "pickup", "open", "putnext", "pick_up_seq_go_to")
GAMES = [
    *(("envs.babyai", task, range(20)) for task in BABYAI),
    *(("envs.babaisai", task, range(10, 11)) for task in BABAISAI),
]


def play(module: str, task: str, seed: int, stray: float) -> Any:
    """The last info of an episode in which so large a share of the moves is drawn at random."""
    env, rng, done, info = Case(module, task).build(seed), random.Random(seed), False, {}
    expert_action = load_env_module(module).expert_action
    env.reset()
    while not done:
        advice = expert_action(env)
        _, done, info = env.step(rng.choice(list(env.actions)) if rng.random() < stray else advice)
    return info


@pytest.mark.parametrize(("module", "task", "seeds"), GAMES)
def test_the_expert_wins(module: str, task: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        info = play(module, task, seed, stray=0.0)
        assert info["terminated"] and info["progression"] == 1.0, seed


@pytest.mark.parametrize("task", BABYAI)
def test_the_expert_wins_nearly_always_if_its_advice_is_not_always_taken(task: str) -> None:
    # An opened box is gone, so a stray toggle may make a mission impossible.
    assert (
        sum(play("envs.babyai", task, seed, stray=0.3)["progression"] for seed in range(20)) >= 18
    )


def test_the_expert_wins_from_wherever_stray_moves_lead() -> None:
    assert play("envs.babaisai", "two_room-break_stop-goto_win", 4, stray=0.3)["progression"] == 1.0
