"""The trial before a run: what it plays, what it leaves out, and what it forgives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.errors import EnvironmentFault
from rollout.spec import EpisodeSpec
from rollout.tasks import make_episode, read_tasks, try_each_task
from rollout.workers.trial import try_environments

GAME = """\
from envs.base import BaseInteractionEnv, make_observation
from envs.errors import EnvironmentFault, JudgeError


class Game(BaseInteractionEnv):
    def __init__(self, task):
        self.task = task
        if task == "unbuilt":
            raise ValueError("no such board")

    def reset(self):
        if self.task == "broken":
            raise ValueError("no board")
        return make_observation("start")

    def step(self, response_text):
        if self.task == "judged":
            try:
                raise JudgeError("no verdict: http://127.0.0.1:1 cannot be reached")
            except JudgeError as error:
                raise EnvironmentFault(str(error)) from error
        if self.task == "nested":
            return helper()
        return make_observation("end"), True, {
            "reward": 1.0, "terminated": True, "truncated": False, "valid_action": True,
            "executed_action": "", "progression": 1.0,
        }


def helper():
    return make_observation(3, 4)  # here


def build_env(sample, args):
    return Game(sample.metadata["task"])
"""


def episodes(folder: Path, *tasks: str) -> tuple[list[EpisodeSpec], RolloutSettings]:
    path = folder / "game.py"
    path.write_text(GAME)
    settings = load_settings(
        SimpleNamespace(rollout_interaction_env_path=str(path), tasks=list(tasks))
    )
    return [make_episode(settings, task, 0, 0) for task in read_tasks(settings)], settings


async def test_once_the_budget_is_used_up_further_tasks_are_built_but_not_played(
    tmp_path: Path,
) -> None:
    assert await try_environments(*episodes(tmp_path, "a", "broken"), budget_s=0.0) == []
    with pytest.raises(
        EnvironmentFault, match="task 'broken': reset raised ValueError: no board at"
    ):
        await try_environments(*episodes(tmp_path, "a", "broken"))
    with pytest.raises(
        EnvironmentFault, match="task 'unbuilt': build_env raised ValueError: no such board at"
    ):
        await try_environments(*episodes(tmp_path, "a", "unbuilt"), budget_s=0.0)


async def test_the_first_task_of_an_environment_is_played_whatever_the_budget(
    tmp_path: Path,
) -> None:
    with pytest.raises(EnvironmentFault, match="task 'broken': reset raised"):
        await try_environments(*episodes(tmp_path, "broken", "a"), budget_s=0.0)


async def test_a_judge_that_does_not_answer_yet_is_a_note(tmp_path: Path) -> None:
    notes = await try_environments(*episodes(tmp_path, "judged"))
    assert notes == ["task 'judged': no verdict: http://127.0.0.1:1 cannot be reached"]


async def test_the_place_of_an_error_is_in_the_users_code_and_not_in_ours(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        await try_environments(*episodes(tmp_path, "nested"))
    line = next(
        number for number, text in enumerate(GAME.splitlines(), 1) if text.endswith("# here")
    )
    assert f"at {tmp_path}/game.py:{line} (`return make_observation(3, 4) # here`)" in str(
        caught.value
    )


def test_tasks_of_training_and_evaluation_that_are_the_same_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def try_environments(found: list[EpisodeSpec], *_: Any, **__: Any) -> list[str]:
        tried.extend(episode.name for episode in found)
        return []

    monkeypatch.setattr("rollout.workers.trial.try_environments", try_environments)
    _, settings = episodes(tmp_path, "a", "b")
    try_each_task(settings)
    assert tried == ["a", "b"]


async def test_a_random_reset_and_threads_that_outlive_an_episode_are_named(tmp_path: Path) -> None:
    found, settings = episodes(tmp_path, "a")
    path = tmp_path / "game.py"
    start = "threading.Thread(target=threading.Event().wait, daemon=True, name='leaked').start()"
    changed = (
        f"        import random, threading\n        {start}\n"
        "        return make_observation(str(random.random()))"
    )
    path.write_text(GAME.replace('        return make_observation("start")', changed))
    random, threads = await try_environments(found, settings)
    assert "task 'a': the same task and seed begin with another observation" in random
    assert threads == "task 'a': each episode leaves threads running (leaked); end them in close"
