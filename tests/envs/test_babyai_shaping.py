"""BabyAI's shaped reward: it pays for the way, and cannot change which policy is best."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test")

from envs import babyai
from envs.babyai_world.potential import potential
from envs.errors import ConfigError


def play(task: str, seed: int, policy: str, **options: Any) -> tuple[list[float], float]:
    """Rewards of one episode, and its first state's potential."""
    metadata = {"task": task, "seed": seed}
    env = babyai.build_env(SimpleNamespace(metadata=metadata), SimpleNamespace(env={"max_steps": 40, **options}))
    env.reset()
    first, rewards, done = potential(env.game), [], False
    rng = random.Random(seed)
    while not done:
        action = babyai.expert_action(env) if policy == "expert" else rng.choice([*env.actions, "jump"])
        _, done, info = env.step(action)
        rewards.append(info["reward"])
    return rewards, first


@pytest.mark.parametrize("policy", ["expert", "random"])
@pytest.mark.parametrize("task", ["goto", "pickup", "open"])
def test_whatever_is_played_the_shaping_of_an_episode_adds_up_to_the_same(task: str, policy: str) -> None:
    for seed in range(6):
        plain, first = play(task, seed, policy)
        shaped, _ = play(task, seed, policy, shaping=0.5, shaping_gamma=0.9)
        assert len(plain) == len(shaped)
        paid = sum(0.9**t * (b - a) for t, (a, b) in enumerate(zip(plain, shaped, strict=True)))
        assert paid == pytest.approx(-0.5 * first)


def test_a_step_towards_the_object_is_paid_and_a_step_away_costs() -> None:
    rewards, _ = play("goto", 3, "expert", shaping=1.0, shaping_gamma=1.0)
    assert max(rewards[:-1]) > 0 and min(rewards) >= 0
    assert min(play("goto", 3, "random", shaping=1.0, shaping_gamma=1.0, format_penalty=0.0)[0]) < 0


def test_missions_about_several_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="env.shaping pays the way to the object of one instruction"):
        play("putnext", 0, "random", shaping=0.5)


@pytest.mark.parametrize("options", [{"shaping": -1.0}, {"shaping": 1.0, "shaping_gamma": 1.5}])
def test_impossible_weights_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="env.shaping must be >= 0"):
        play("goto", 0, "random", **options)
