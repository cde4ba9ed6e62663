"""BabyAI: parity with the recordings, every registered level, options, and the scripted expert."""

from typing import Any

import pytest

pytest.importorskip(
    "minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test"
)

from envs import babyai
from envs.babyai.levels import HELD_OUT, MIXED_GOALS
from envs.loading import build_env_from
from tests.conftest import load_recording
from tests.fixtures.games import play_expert


def build(task: str = "goto", seed: int = 0, **options: Any) -> babyai.BabyAI:
    return build_env_from("envs.babyai", {"task": task, "seed": seed}, options)


def _win(env: babyai.BabyAI) -> dict:
    env.reset()
    return play_expert(env, babyai)[-1]


def test_verlog_pays_one_for_a_win_and_balrog_pays_less_the_longer_it_took() -> None:
    assert _win(build())["reward"] == 1.0
    env = build(preset="balrog")
    assert _win(env)["reward"] == pytest.approx(1 - 0.9 * env.game.step_count / 64)
    assert _win(build(preset="balrog", binary_reward=True))["reward"] == 1.0


@pytest.mark.parametrize("goal", MIXED_GOALS)
def test_mixed_missions_never_name_what_is_held_out_and_generation_is_silent(
    goal: str, capfd: Any
) -> None:
    env = build(goal, num_dists=8)
    for seed in range(60):
        env.seed = seed
        env.reset()
        assert not any(name in env.mission for name in HELD_OUT)
    assert capfd.readouterr().out == ""


def test_the_expert_plays_the_recorded_expert_games() -> None:
    for episode in load_recording("babyai_bot.json.gz")["episodes"]:
        env = build(episode["task"], episode["seed"])
        env.reset()
        for step in episode["steps"]:
            assert babyai.expert_action(env) == step["a"]
            env.step(step["a"])
