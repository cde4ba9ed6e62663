"""Combinations of flags that would train wrongly are refused before a batch is played; the error names the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.checks import CONVERTER, FIXED_TURN, GENERATE, INSTALL, SOURCE, check_flags
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from rollout.fixed_turn import generate_rollout
from rollout.preflight import check, main
from tests.fixtures.rollout_args import rollout_args

HOOKS = {
    "rollout_function_path": FIXED_TURN,
    "data_source_path": SOURCE,
    "custom_convert_samples_to_train_data_path": CONVERTER,
    "custom_megatron_init_path": INSTALL,
    "custom_advantage_function_path": None,
    "advantage_estimator": "ppo",
    "use_dynamic_batch_size": True,
    "over_sampling_batch_size": 24,
    "partial_rollout": False,
    "dynamic_sampling_filter_path": None,
    "rollout_global_dataset": True,
    "sglang_context_length": None,
}

FIXED_TURN_FAULTS = [
    ({"global_batch_size": 7}, "not a multiple of --global-batch-size 7"),
    ({"global_batch_size": None}, "--global-batch-size None"),
    ({"turn_quota": "per_env", "n_env": 5}, "change n_env"),
    ({"critic_warmup": {"w_epoch": 3, "w_iter": 1}, "num_critic_only_steps": 2}, "--num-critic-only-steps is 2 .* 4;"),
    ({"custom_convert_samples_to_train_data_path": None}, "--custom-convert-samples-to-train-data-path rollout"),
    ({"data_source_path": None}, "--data-source-path rollout.data_source.EpisodeSource"),
    ({"use_dynamic_batch_size": False}, "--use-dynamic-batch-size"),
    ({"rollout_max_context_len": 30}, "--rollout-max-context-len 30 leaves no room"),
    ({"sglang_context_length": 4000}, "--sglang-context-length 4000"),
    ({"custom_megatron_init_path": None}, "--custom-megatron-init-path advantage.patch.install"),
    ({"advantage_estimator": "grpo"}, "--advantage-estimator is grpo"),
    ({"advantage_estimator": "grpo", "custom_megatron_init_path": None}, "--custom-advantage-function-path"),
    ({"partial_rollout": True}, "--partial-rollout steers slime's own outer loop"),
    ({"dynamic_sampling_filter_path": "a.b"}, "--dynamic-sampling-filter-path"),
    ({"over_sampling_batch_size": 48}, "--over-sampling-batch-size"),
    ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset"),
    ({"data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer"}, "--data-source-path is missing"),
    ({"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"}, "nothing that plays turns"),
    ({"custom_advantage_function_path": "my.function"}, "would replace it, drop one of them .in the actor"),
    ({"value_first_token_weight": 0}, "value_first_token_weight must be"),
    ({"fp16": True}, "--fp16"),
    ({"megatron_config_path": None}, "is the folder of both actor and critic"),
]


@pytest.mark.parametrize(("overrides", "words"), FIXED_TURN_FAULTS)
def test_fixed_turn_batches_are_refused_before_anything_is_played(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    args = rollout_args(tmp_path, **{**HOOKS, **overrides})
    with pytest.raises(ConfigError, match=words):
        EpisodeSource(args)


def test_good_flags_pass(tmp_path: Path) -> None:
    EpisodeSource(rollout_args(tmp_path, **HOOKS))
    group = {"advantage_estimator": "grpo", "custom_megatron_init_path": None, "custom_advantage_function_path": "x.y"}
    EpisodeSource(rollout_args(tmp_path, **HOOKS | group))


def test_the_first_batch_checks_flags_that_name_no_rollout_function(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, global_batch_size=7)
    with pytest.raises(ConfigError, match="--global-batch-size 7"):
        generate_rollout(args, 0, EpisodeSource(args))


def test_a_context_longer_than_the_model_has_positions_is_refused(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, **HOOKS)
    config = Path(args.hf_checkpoint) / "config.json"
    config.write_text(json.dumps({"text_config": {"max_position_embeddings": 2048}}))
    with pytest.raises(ConfigError, match="max_position_embeddings 2048"):
        EpisodeSource(args)
    args.sglang_context_length = 8192
    EpisodeSource(args)


def test_debug_rollout_only_needs_no_training_flags(tmp_path: Path) -> None:
    overrides = {"debug_rollout_only": True, "custom_convert_samples_to_train_data_path": None}
    EpisodeSource(rollout_args(tmp_path, **HOOKS | overrides | {"custom_megatron_init_path": None}))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"use_dynamic_batch_size": False}, "--use-dynamic-batch-size"),
        ({"critic_warmup": {"w_epoch": 2}}, "--rollout-function-path rollout.fixed_turn"),
        ({"custom_convert_samples_to_train_data_path": None}, "--custom-convert-samples-to-train-data-path"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator is gspo"),
        ({"rollout_max_context_len": 30}, "--rollout-max-context-len"),
    ],
)
def test_wrong_flags_for_whole_episodes_are_refused(tmp_path: Path, overrides: dict[str, Any], words: str) -> None:
    args = rollout_args(
        tmp_path,
        **{**HOOKS, "rollout_function_path": "slime.x", "custom_generate_function_path": GENERATE, **overrides},
    )
    with pytest.raises(ConfigError, match=words):
        check_flags(args, load_settings(args))


def test_whole_episodes_may_use_slimes_own_batches_and_group_estimators(tmp_path: Path) -> None:
    overrides = {
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "custom_generate_function_path": GENERATE,
        "advantage_estimator": "grpo",
        "custom_megatron_init_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "use_dynamic_batch_size": False,
        "over_sampling_batch_size": 48,
        "partial_rollout": True,
        "history": "full",
    }
    EpisodeSource(rollout_args(tmp_path, **HOOKS | overrides))


def test_preflight_makes_an_environment_of_every_task(tmp_path: Path) -> None:
    check(rollout_args(tmp_path, **HOOKS))
    with pytest.raises(ConfigError, match="max_lenght"):
        check(rollout_args(tmp_path, **HOOKS, env={"max_lenght": 3}))
    with pytest.raises(ConfigError, match="--global-batch-size 7"):
        check(rollout_args(tmp_path, **HOOKS, global_batch_size=7))


def test_preflight_without_a_framework_asks_for_a_checkout_on_pythonpath() -> None:
    assert FRAMEWORK == "none"
    with pytest.raises(SystemExit, match=r"^error: .* PYTHONPATH$"):
        main()
