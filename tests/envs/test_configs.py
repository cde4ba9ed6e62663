"""The YAML files in custom_configs/ build every task that they name, and show the defaults of what
they leave out."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from envs.errors import MissingDependencyError
from envs.loading import build_env_from
from envs.text_game import GameSettings
from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.tasks import read_tasks
from slime_verlog import read_settings

CONFIGS = Path(__file__).parents[2] / "custom_configs"
BUILT = (
    "babaisai",
    "crafter",
    "judge",
    "nethack",
    "reasoning_gym",
    "recall",
    "sokoban",
    "textarena",
)
BUILT += ("textworld", "alfworld", "balrog", "mixture")
GAMES = ("alfworld", "babyai", "balrog", "crafter", "reasoning_gym", "scienceworld", "textworld")


@pytest.mark.parametrize("name", BUILT)
def test_every_task_of_the_config_can_be_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json_2.1.1").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = load_settings(SimpleNamespace(custom_config_path=str(CONFIGS / f"{name}.yaml")))
    tasks = [*read_tasks(config), *read_tasks(config, config.eval)]
    assert tasks
    for task in tasks:
        try:
            build_env_from(task.env_path, {"task": task.task, "seed": 0}, task.options).close()
        except MissingDependencyError as error:
            pytest.skip(str(error))


def load(name: str, uncomment: bool = False) -> dict[str, Any]:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    if uncomment:
        # A commented key is `# key: default`; a sentence has no colon after its first word.
        lines = [line.replace("# ", "", 1) if _is_key(line) else line for line in lines]
    return yaml.safe_load("\n".join(lines))


def _is_key(line: str) -> bool:
    words = line.lstrip().removeprefix("# ")
    if words == line.lstrip():
        return False
    return words.split(":")[0].isidentifier() and not words.startswith(
        ("train:", "test:", "data: null", "tasks:")
    )


@pytest.mark.parametrize("name", ["tools", "judge", "geo3k", "agent"])
def test_every_commented_key_shows_its_default(name: str) -> None:
    config, full = load(name), load(name, uncomment=True)
    model = importlib.import_module(f"envs.{name}").SETTINGS
    assert read_settings(model, config["env"], "env.") == read_settings(model, full["env"], "env.")
    read_settings(RolloutSettings, full)
    assert full != config


@pytest.mark.parametrize("name", GAMES)
def test_every_game_has_two_presets(name: str) -> None:
    if name == "crafter":
        pytest.importorskip("crafter", reason="Crafter needs pip install 'slime-verlog[envs]'")
    model = importlib.import_module(f"envs.{name}").SETTINGS
    assert issubclass(model, GameSettings)
    trained, measured = model(), model(preset="balrog")
    assert (trained.format_penalty, measured.format_penalty, measured.binary_reward) == (
        0.1,
        0.0,
        False,
    )
    assert {key: getattr(measured, key) for key in model.balrog} == dict(model.balrog)
    assert model(preset="balrog", format_penalty=0.3).format_penalty == 0.3
