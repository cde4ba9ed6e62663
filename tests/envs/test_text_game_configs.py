"""The YAMLs of the text games and of the mixture name tasks and options that their environments accept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.errors import MissingDependencyError
from envs.loading import build_env_from
from rollout.bridge.settings import load_settings
from rollout.data_source import read_tasks

CONFIGS = Path(__file__).parents[2] / "custom_configs"


@pytest.mark.parametrize("name", ["textworld", "alfworld", "balrog", "mixture"])
def test_every_task_of_the_config_can_be_built(name: str) -> None:
    config = load_settings(SimpleNamespace(custom_config_path=str(CONFIGS / f"{name}.yaml")))
    tasks = [*read_tasks(config), *read_tasks(config, config.eval)]
    assert tasks
    for task in tasks:
        try:
            build_env_from(task.env_path, {"task": task.task, "seed": 0}, task.options).close()
        except MissingDependencyError as error:
            pytest.skip(str(error))
