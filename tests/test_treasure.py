"""The tutorial's environment keeps the contract, and leaves room between random play and its expert."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from envs.loading import build_env_from, load_env_module
from rollout.bridge.settings import RolloutSettings
from rollout.play.memory import Exchange, WindowMemory, build_messages
from slime_verlog import read_settings

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


def test_random_play_seldom_wins() -> None:
    rng = random.Random(0)
    wins = sum(play(seed, lambda env: rng.choice(env.actions))["terminated"] for seed in range(300))
    assert 15 < wins < 75


def test_the_same_seed_gives_the_same_episode_and_time_runs_out() -> None:
    lost = play(1, lambda env: "dance")
    assert (lost["truncated"], lost["terminated"], lost["valid_action"]) == (True, False, False)
    assert lost["executed_action"] == "go north" and lost["reward"] == pytest.approx(-0.1)
    first, second = (build_env_from(FILE, {"task": "treasure", "seed": 5}).reset() for _ in range(2))
    assert first == second


def test_the_yaml_is_one_that_the_rollout_reads() -> None:
    config = yaml.safe_load((EXAMPLES / "treasure.yaml").read_text(encoding="utf-8"))
    assert read_settings(RolloutSettings, config).tasks == ("treasure",)


def test_the_guide_shows_the_prompt_that_the_model_sees() -> None:
    """The second prompt of seed 2, under a window of one turn."""
    env = build_env_from(FILE, {"task": "treasure", "seed": 2}, {})
    first, answer = env.reset(), "THINK: The treasure is west and south.\nACTION: go west"
    second, _, info = env.step(answer)
    past = [Exchange(first, answer, info["valid_action"], info["executed_action"])]
    messages = build_messages(WindowMemory(1), env.instruction_prompt, past, second, 1, env.answer_format)
    shown = "\n".join(f"[{message['role']}]\n{message['content']}\n" for message in messages)
    assert f"```text\n{shown}```" in (EXAMPLES.parent / "environments.md").read_text(encoding="utf-8")
