"""ScienceWorld with its real simulator: commands, rewards, endings, seeds, Java processes, and what is refused."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.loading import build_env_from

pytest.importorskip("scienceworld", reason="pip install -e '.[scienceworld]' enables this test")
if shutil.which("java") is None:
    pytest.skip("Java enables this test: apt-get install -y default-jre-headless", allow_module_level=True)

import envs.scienceworld as jvms
from envs.scienceworld import ScienceWorld, expert_action


def make(task: str = "find-plant", seed: int = 0, **env: Any) -> ScienceWorld:
    return build_env_from("envs.scienceworld", {"task": task, "seed": seed}, env)


@pytest.fixture
def env() -> Iterator[ScienceWorld]:
    env = make()
    yield env
    env.close()


@pytest.mark.slow
def test_the_games_own_solution_wins_and_its_rewards_add_up_to_one(env: ScienceWorld) -> None:
    env.reset()
    assert "Your task is to find a(n) plant" in env.instruction_prompt
    rewards, done, info = [], False, None
    while not done:
        _, done, info = env.step(expert_action(env))
        rewards.append(info["reward"])
    assert info["terminated"] and info["progression"] == 1.0
    assert sum(rewards) == pytest.approx(1.0)


@pytest.mark.slow
def test_what_the_game_does_not_understand_changes_nothing_and_costs_the_penalty(env: ScienceWorld) -> None:
    before = env.reset()["text"]["long_term_context"]
    observation, _, info = env.step("ACTION: juggle the moon")
    assert (info["valid_action"], info["reward"], info["executed_action"]) == (False, -0.1, "look around")
    assert observation["text"]["long_term_context"] == before
    assert "In your inventory, you see:" in observation["text"]["short_term_context"]
    assert env.step("inventory")[2]["valid_action"]


@pytest.mark.slow
def test_the_seed_chooses_a_variation_of_the_split() -> None:
    worlds = {split: make("melt", 3, split=split) for split in ("train", "dev")}
    texts = {split: (env.reset()["obs_str"], env.mission) for split, env in worlds.items()}
    again = make("1-2", 3)
    assert (again.reset()["obs_str"], again.mission) == texts["train"] != texts["dev"]
    for env in (*worlds.values(), again):
        env.close()


@pytest.mark.slow
def test_java_processes_are_reused_and_bounded() -> None:
    first = make(most_jvms=1)
    for world in list(jvms._idle):
        jvms._idle.remove(world)
        jvms._ended()
        world.close()
    first.reset()
    world = first._world
    with pytest.raises(ConfigError, match=r"lower n_env, raise env_workers, or raise env\.most_jvms"):
        make(most_jvms=1).reset()
    first.close()
    first.close()
    second = make("melt", most_jvms=1)
    second.reset()
    assert second._world is world
    second.close()


@pytest.mark.slow
def test_a_java_process_that_dies_costs_one_episode_and_is_not_used_again(env: ScienceWorld) -> None:
    env.reset()
    broken = env._world
    broken._env._gateway.java_process.kill()
    with pytest.raises(EnvironmentFault, match="ScienceWorld's Java process failed"):
        env.step("look around")
    env.close()
    env.reset()
    assert env._world is not broken and env.step("look around")[2]["valid_action"]
