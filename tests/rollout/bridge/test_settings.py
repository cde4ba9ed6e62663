"""Reading the YAML: defaults, and one sentence for every invalid setting."""

from argparse import Namespace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from advantage.settings import ValuePretrainingSettings, WarmupSettings
from envs.babyai import BabyAISettings
from rollout.bridge.settings import (
    YAML_KEYS,
    EngineSettings,
    EvalSettings,
    MemorySettings,
    load_settings,
)
from rollout.errors import ConfigError

REPO = Path(__file__).parents[3]


def load(tmp_path: Path, **keys: Any) -> Any:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"rollout_interaction_env_path": "envs.babyai", **keys}))
    return load_settings(Namespace(custom_config_path=str(path)))


def test_every_key_has_the_papers_default(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.gamma_step, config.lambda_step, config.gamma_token, config.lambda_token) == (
        0.99,
        0.95,
        1.0,
        1.0,
    )
    assert config.value_first_token_weight == 3.0
    assert (config.history, config.memory.kind, config.memory.n, config.turn_quota) == (
        "window",
        "window",
        1,
        "global",
    )
    assert not config.bootstrap_on_time_limit


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"critic_warmup": {"w_iter": 4}}, "w_epoch is 0"),
        ({"history": "full", "use_inference_chat_template": True}, "use history: window with it"),
        ({"history": "full", "memory": {"kind": "inline_notes"}}, "memory.kind: inline_notes"),
        (
            {"env": {"days": [{"start": date(2026, 1, 2)}]}},
            "2026-01-02, a date, which no checkpoint can hold",
        ),
    ],
)
def test_an_invalid_setting_is_refused_with_the_key_and_the_fix(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **keys)
    assert words in str(error.value)


def test_a_missing_environment_path_is_named() -> None:
    with pytest.raises(ConfigError, match="rollout_interaction_env_path is missing"):
        load_settings(Namespace(custom_config_path=None))


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("- a")
    with pytest.raises(ConfigError, match="must hold a mapping of settings, got list"):
        load_settings(Namespace(custom_config_path=str(path)))


@pytest.mark.parametrize(
    "path", sorted((REPO / "custom_configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_shipped_config_is_accepted(path: Path) -> None:
    load_settings(Namespace(custom_config_path=str(path)))


def test_the_documented_config_names_every_key() -> None:
    text = (REPO / "custom_configs" / "babyai.yaml").read_text()
    models = (
        MemorySettings,
        EvalSettings,
        EngineSettings,
        WarmupSettings,
        ValuePretrainingSettings,
        BabyAISettings,
    )
    nested = [name for model in models for name in model.model_fields]
    missing = [name for name in sorted({*YAML_KEYS, *nested}) if f"{name}:" not in text]
    assert not missing


def test_the_preset_for_long_conversations_sets_prompts_too_and_the_yamls_own_keys_take_precedence(
    tmp_path: Path,
) -> None:
    compacted = {"kind": "notes", "free": 10_240, "keep": 2, "times": 3, "max_tokens": 2048}
    spelt_out = load(
        tmp_path, preset="sao", gae_form="compaction", history="full", memory=compacted
    )
    assert load(tmp_path, preset="glm52") == spelt_out.model_copy(update={"preset": "glm52"})
    assert load(tmp_path, preset="glm52", memory={"free": 500}).memory == MemorySettings(
        **{**compacted, "free": 500}
    )
    changed = load(tmp_path, preset="glm52", history="window", gae_form="dual")
    assert (changed.history, changed.memory, changed.gae_form) == (
        "window",
        MemorySettings(),
        "dual",
    )
