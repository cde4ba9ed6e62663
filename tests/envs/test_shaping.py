"""The shaped reward of games: it pays for the way, and cannot change which policy is best."""

import importlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test")

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
        pytest.importorskip("fast_downward", reason="ALFWorld: pip install 'slime-verlog[alfworld]' enables this test")
    module = importlib.import_module("tests.fixtures.alfworld_rooms" if name == "alfworld" else f"envs.{name}")
    sample = SimpleNamespace(metadata={"task": task, "seed": seed})
    return module, module.build_env(sample, SimpleNamespace(env={"max_steps": 25, **options}))


def play(name: str, task: str, seed: int, policy: str, **options: Any) -> tuple[list[float], float]:
    """Rewards of one episode, and how much of the way was left at its start."""
    module, env = build(name, task, seed, **options)
    env.reset()
    first, rewards, done = env.distance_left(), [], False
    rng = random.Random(seed)
    while not done:
        action = module.expert_action(env) if policy == "expert" else rng.choice([*env.actions, "jump"])
        _, done, info = env.step(action)
        rewards.append(info["reward"])
    env.close()
    return rewards, first


@pytest.mark.parametrize("policy", ["expert", "random"])
@pytest.mark.parametrize(("name", "task"), GAMES)
def test_whatever_is_played_the_shaping_of_an_episode_adds_up_to_the_same(name: str, task: str, policy: str) -> None:
    for seed in range(4):
        plain, first = play(name, task, seed, policy)
        shaped, _ = play(name, task, seed, policy, shaping=0.5, shaping_gamma=0.9)
        assert len(plain) == len(shaped) and 0 <= first <= 1
        paid = sum(0.9**t * (b - a) for t, (a, b) in enumerate(zip(plain, shaped, strict=True)))
        assert paid == pytest.approx(0.5 * first)


@pytest.mark.parametrize(("name", "task"), [("babyai", "goto"), ("babaisai", "make_win")])
def test_a_step_towards_the_goal_is_paid_and_a_step_away_costs(name: str, task: str) -> None:
    rewards, _ = play(name, task, 3, "expert", shaping=1.0, shaping_gamma=1.0)
    assert max(rewards[:-1]) > 0 and min(rewards) >= 0
    assert min(play(name, task, 3, "random", shaping=1.0, shaping_gamma=1.0, format_penalty=0.0)[0]) < 0


def test_the_plan_that_shaping_follows_shrinks_by_one_move_with_every_move_of_it() -> None:
    module, env = build("babaisai", "make_win", 0)
    env.reset()
    left, done = [env.distance_left()], False
    while not done:
        _, done, _ = env.step(module.expert_action(env))
        if not done:
            left.append(env.distance_left())
    assert left == pytest.approx([1 - move / len(left) for move in range(len(left))])


def test_a_plan_found_only_later_measures_the_way_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, env = build("babaisai", "make_win", 0)
    plans = iter([[], ["up"] * 33, ["up"] * 11, []])
    monkeypatch.setattr(env, "plan", lambda: next(plans))
    assert [env.distance_left() for _ in range(4)] == pytest.approx([1.0, 1.0, 1 / 3, 1.0])


def test_missions_about_several_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="env.shaping needs a mission with one object"):
        play("babyai", "putnext", 0, "random", shaping=0.5)


def test_games_that_cannot_tell_how_far_their_goal_is_are_refused_when_they_are_built() -> None:
    with pytest.raises(ConfigError, match="env.shaping: Crafter cannot measure how far its goal is"):
        build("crafter", "default", 0, shaping=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shaping": -1.0}, "env.shaping must be at least 0, got -1"),
        ({"shaping": 1.0, "shaping_gamma": 1.5}, "env.shaping_gamma must be at most 1, got 1.5"),
    ],
)
def test_impossible_weights_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("babyai", "goto", 0, **options)
