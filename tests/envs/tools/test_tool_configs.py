"""The configurations of tools, judge, geometry and agents hold keys that exist, and their environments start."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from envs.agent import AgentSettings
from envs.geo3k import Geo3kSettings
from envs.judge import JudgedSettings
from envs.tools import ToolSettings, load_tools
from rollout.bridge.settings import RolloutSettings
from slime_verlog import read_settings

CONFIGS = Path(__file__).parents[3] / "custom_configs"
SETTINGS = {"tools": ToolSettings, "judge": JudgedSettings, "geo3k": Geo3kSettings, "agent": AgentSettings}


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
    return words.split(":")[0].isidentifier() and not words.startswith(("train:", "test:", "data: null", "tasks:"))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_exists_and_every_commented_key_shows_its_default(name: str) -> None:
    config, full = load(name), load(name, uncomment=True)
    plain = read_settings(RolloutSettings, config)
    read_settings(RolloutSettings, full)
    settings = read_settings(SETTINGS[name], config["env"], "env.")
    everything = read_settings(SETTINGS[name], full["env"], "env.")
    assert plain.rollout_interaction_env_path == f"envs.{name}"
    assert settings == everything, "a commented key does not show its default"
    assert set(full["env"]) > set(config["env"]) or set(full["env"].get("judge", {})) > set(config["env"]["judge"])


@pytest.mark.parametrize("name", ["tools", "judge", "geo3k", "easy_vqa", "swe", "agent"])
def test_every_setting_is_described_and_has_a_json_schema(name: str) -> None:
    schema = importlib.import_module(f"envs.{name}").SETTINGS.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    undescribed = [key for model in models for key, value in model["properties"].items() if "description" not in value]
    assert not undescribed


def test_the_tools_of_the_configuration_load() -> None:
    (spec,) = load_tools(load("tools")["env"]["tools"])
    assert spec.name == "search" and spec.timeout_s == 10.0


def test_the_judged_environment_of_the_configuration_starts(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="minigrid is not installed; pip install 'slime-verlog[envs]'")
    from envs.judge import build_env

    options = load("judge")["env"]
    options["judge"]["cache"] = str(tmp_path / "verdicts.sqlite")
    env = build_env(SimpleNamespace(metadata={"task": "goto", "seed": 1}), SimpleNamespace(env=options))
    assert "Your goal" in env.reset()["obs_str"] + env.instruction_prompt or env.mission
    assert "reasoning" in env.rubric.system_prompt()
