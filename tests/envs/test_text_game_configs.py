"""The games' settings models, and the YAMLs of the text games and of the mixture."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.errors import MissingDependencyError
from envs.loading import build_env_from
from envs.text_game import GameSettings
from rollout.bridge.settings import load_settings
from rollout.tasks import read_tasks

CONFIGS = Path(__file__).parents[2] / "custom_configs"


@pytest.mark.parametrize(
    "name",
    ["nethack", "reasoning_gym", "recall", "sokoban", "textarena", "textworld", "alfworld", "balrog", "mixture"],
)
def test_every_task_of_the_config_can_be_built(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json_2.1.1").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    config = load_settings(SimpleNamespace(custom_config_path=str(CONFIGS / f"{name}.yaml")))
    tasks = [*read_tasks(config), *read_tasks(config, config.eval)]
    assert tasks
    for task in tasks:
        try:
            build_env_from(task.env_path, {"task": task.task, "seed": 0}, task.options).close()
        except MissingDependencyError as error:
            pytest.skip(str(error))


GAMES = [
    "alfworld",
    "babaisai",
    "babyai",
    "balrog",
    "crafter",
    "gymnasium_text",
    "reasoning_gym",
    "recall",
    "scienceworld",
    "sokoban",
    "textarena",
    "textworld",
]


@pytest.mark.parametrize("name", GAMES)
def test_every_game_exposes_documented_settings_with_two_presets(name: str) -> None:
    if name == "crafter":
        pytest.importorskip("crafter", reason="Crafter needs pip install 'slime-verlog[envs]'")
    model = importlib.import_module(f"envs.{name}").SETTINGS
    assert issubclass(model, GameSettings) and model.model_json_schema()["additionalProperties"] is False
    assert all(field.description for field in model.model_fields.values())
    trained, measured = model(), model(preset="balrog")
    assert (trained.format_penalty, measured.format_penalty, measured.binary_reward) == (0.1, 0.0, False)
    assert {key: getattr(measured, key) for key in model.balrog} == dict(model.balrog)
    assert model(preset="balrog", format_penalty=0.3).format_penalty == 0.3


@pytest.mark.parametrize(
    ("path", "task"),
    [("babaisai", "goto_win"), ("babyai", "goto"), ("babyai", "errands"), ("crafter", "default")],
)
def test_a_game_shows_the_time_left(path: str, task: str) -> None:
    if path == "crafter":
        pytest.importorskip("crafter", reason="Crafter needs pip install 'slime-verlog[envs]'")
    env = build_env_from(f"envs.{path}", {"task": task, "seed": 0}, {"show_time_left": True, "max_steps": 10})
    told = [env.reset(), env.step("ACTION: look around")[0]]
    assert [text["text"]["short_term_context"].splitlines()[-1] for text in told] == [
        "Time left: 100%",
        "Time left: 90%",
    ]
    env.close()
