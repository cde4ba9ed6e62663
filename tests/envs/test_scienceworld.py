"""ScienceWorld with its real simulator: commands, rewards, endings, seeds, Java processes, and what
is refused."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.loading import build_env_from

pytest.importorskip("scienceworld", reason="pip install -e '.[scienceworld]' enables this test")
if shutil.which("java") is None:
    pytest.skip(
        "Java enables this test: apt-get install -y default-jre-headless", allow_module_level=True
    )

import envs.scienceworld as jvms
from envs.scienceworld import ScienceWorld, expert_action
from tests.envs.contract import fuzz


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
def test_what_the_game_does_not_understand_changes_nothing_and_costs_the_penalty(
    env: ScienceWorld,
) -> None:
    before = env.reset()["text"]["long_term_context"]
    observation, _, info = env.step("ACTION: juggle the moon")
    assert (info["valid_action"], info["reward"], info["executed_action"]) == (
        False,
        -0.1,
        "look around",
    )
    assert observation["text"]["long_term_context"] == before
    assert "In your inventory, you see:" in observation["text"]["short_term_context"]
    assert env.step("inventory")[2]["valid_action"]


@pytest.mark.slow
def test_focusing_on_the_wrong_thing_fails_the_task(env: ScienceWorld) -> None:
    env.reset()
    _, done, info = env.step("focus on agent")
    assert done and info["terminated"] and info["reward"] == -1.0
    assert info["progression"] == 0.0 and info["metrics"]["failed"] == 1.0


@pytest.mark.slow
def test_the_limit_of_turns_truncates_and_any_answer_is_taken() -> None:
    env = make(max_steps=5)
    env.reset()
    ends = 0
    for answer in fuzz(env, 30):
        _, done, info = env.step(answer)
        ends += done and info["truncated"]
        if done:
            env.reset()
    env.close()
    assert ends == 6


@pytest.mark.slow
def test_the_seed_chooses_a_variation_of_the_split() -> None:
    worlds = {split: make("melt", 3, split=split) for split in ("train", "dev")}
    texts = {split: (env.reset()["obs_str"], env.mission) for split, env in worlds.items()}
    again = make("1-2", 3)
    assert (again.reset()["obs_str"], again.mission) == texts["train"] != texts["dev"]
    for env in (*worlds.values(), again):
        env.close()


@pytest.mark.slow
def test_java_processes_are_reused() -> None:
    first = make()
    first.reset()
    world = first._world
    first.close()
    first.close()
    second = make("melt")
    second.reset()
    assert second._world is world
    second.close()


@pytest.mark.slow
def test_a_java_process_that_dies_costs_one_episode_and_is_not_used_again(
    env: ScienceWorld,
) -> None:
    env.reset()
    broken = env._world
    broken._env._gateway.java_process.kill()
    with pytest.raises(EnvironmentFault, match="ScienceWorld's Java process failed"):
        env.step("look around")
    env.close()
    env.reset()
    assert env._world is not broken and env.step("look around")[2]["valid_action"]


@pytest.mark.slow
def test_an_unknown_simplification_is_refused() -> None:
    with pytest.raises(ConfigError, match="env.simplifications: .*openWindows"):
        make(simplifications="openWindows").reset()


def test_without_java_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    jvms.load_library.cache_clear()
    with pytest.raises(MissingDependencyError, match="needs Java 8 or newer.*apt-get install"):
        make()
    jvms.load_library.cache_clear()


# The library's own __del__.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_java_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(jvms, "_idle", [])
    with pytest.raises(EnvironmentFault, match="Java process did not start.*java -version"):
        make().reset()
