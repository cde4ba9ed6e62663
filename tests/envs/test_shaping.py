"""The shaped reward of games: it pays for the way, and cannot change which policy is best."""

import importlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test"
)

from envs.errors import ConfigError

GAMES = [
    ("babyai", "goto"),
    ("babyai", "pickup"),
    ("babyai", "open"),
    ("babaisai", "goto_win"),
    ("babaisai", "two_room-break_stop-goto_win"),
    ("babaisai", "make_win"),
    ("sokoban", "one_box"),
    ("alfworld", "look_at_obj_in_light"),
]


def build(name: str, task: str, seed: int, **options: Any) -> Any:
    if name == "alfworld":
        pytest.importorskip(
            "fast_downward",
            reason="ALFWorld: pip install 'slime-verlog[alfworld]' enables this test",
        )
    module = importlib.import_module(
        "tests.fixtures.alfworld_rooms" if name == "alfworld" else f"envs.{name}"
    )
    sample = SimpleNamespace(metadata={"task": task, "seed": seed})
    return module, module.build_env(sample, SimpleNamespace(env={"max_steps": 25, **options}))


def play(name: str, task: str, seed: int, policy: str, **options: Any) -> tuple[list[float], float]:
    """Rewards of one episode, and how much of the way was left at its start."""
    module, env = build(name, task, seed, **options)
    env.reset()
    first, rewards, done = env.distance_left(), [], False
    rng = random.Random(seed)
    while not done:
        action = (
            module.expert_action(env) if policy == "expert" else rng.choice([*env.actions, "jump"])
        )
        _, done, info = env.step(action)
        rewards.append(info["reward"])
    env.close()
    return rewards, first


@pytest.mark.parametrize("policy", ["expert", "random"])
@pytest.mark.parametrize(("name", "task"), GAMES)
def test_whatever_is_played_the_shaping_of_an_episode_adds_up_to_the_same(
    name: str, task: str, policy: str
) -> None:
    for seed in range(4):
        plain, first = play(name, task, seed, policy)
        shaped, _ = play(name, task, seed, policy, shaping=0.5, shaping_gamma=0.9)
        assert len(plain) == len(shaped) and 0 <= first <= 1
        paid = sum(0.9**t * (b - a) for t, (a, b) in enumerate(zip(plain, shaped, strict=True)))
        assert paid == pytest.approx(0.5 * first)


def test_missions_about_several_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="env.shaping needs a mission with one object"):
        play("babyai", "putnext", 0, "random", shaping=0.5)
