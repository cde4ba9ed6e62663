"""The configuration reference and the schema match the settings models, and every YAML names and
matches the schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts import write_results
from scripts.write_reference import COMMAND, SCHEMA, environment_models, outputs
from slime_verlog import ConfigError, Settings, read_settings

CONFIGS = sorted(SCHEMA.parent.glob("*.yaml"))


@pytest.fixture(scope="module")
def written() -> dict[Path, str]:
    return outputs()


@pytest.fixture(scope="module")
def validator(written: dict[Path, str]) -> jsonschema.Draft202012Validator:
    schema = json.loads(written[SCHEMA])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_files_match_the_models(written: dict[Path, str]) -> None:
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is out of date; run: {COMMAND}"
        )


def test_the_tables_of_results_match_the_raw_numbers() -> None:
    for path in write_results.PAGES:
        page = path.read_text(encoding="utf-8")
        assert write_results.filled(page) == page, (
            f"{path.name} is out of date; run: {write_results.COMMAND}"
        )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_yaml_matches_the_schema(
    path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    errors = validator.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert not [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def test_every_key_of_every_model_has_a_description(written: dict[Path, str]) -> None:
    rows = [
        line for text in written.values() for line in text.splitlines() if line.startswith("| `")
    ]
    assert len(rows) > 50
    assert not [row for row in rows if row.removesuffix(" |").endswith("| ")]


@pytest.mark.parametrize(
    "mistake",
    [{"n_envs": 4}, {"n_env": 0}, {"turn_quota": "all"}, {"memory": {"m": 1}}],
    ids=lambda mistake: next(iter(mistake)),
)
def test_the_schema_refuses_what_the_models_refuse(
    mistake: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    good = {"rollout_interaction_env_path": "envs.babyai", "memory": None}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, **mistake})


@pytest.mark.parametrize(("name", "model"), environment_models().items())
def test_options_are_checked_by_the_environment_that_the_yaml_names(
    name: str, model: type[Settings], validator: jsonschema.Draft202012Validator
) -> None:
    env = {"no_such_option": 1}
    with pytest.raises(ConfigError):
        read_settings(model, env, "env.")
    assert not validator.is_valid({"rollout_interaction_env_path": name, "env": env})
