"""Combinations of flags that would train wrongly are refused before a batch is played; the error
names the flag."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from advantage.flags import HOOK, INSTALL
from advantage.turn_table import CONVERTER
from rollout.bridge.checks import CONTINUOUS, FIXED_TURN, GENERATE, SOURCE, check_flags
from rollout.bridge.framework import HAS_SLIME
from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from rollout.fixed_turn import generate_rollout
from rollout.preflight import check, flags_without_effect, main
from tests.fixtures.rollout_args import rollout_args
from tests.scripts.conftest import REPO, recorded_own_flags

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

GROUP = {
    "advantage_estimator": "grpo",
    "custom_megatron_init_path": None,
    "custom_advantage_function_path": "advantage.group.compute_advantages",
}

SLIMES_GRPO = {**GROUP, "custom_advantage_function_path": None}

EPISODES = {"rollout_function_path": "slime.x", "custom_generate_function_path": GENERATE}

FIXED_TURN_FAULTS = [
    ({"global_batch_size": 7}, "not a multiple of --global-batch-size 7"),
    ({"turn_quota": "per_env", "n_env": 5}, "change n_env"),
    (
        {"critic_warmup": {"w_epoch": 3, "w_iter": 1}, "num_critic_only_steps": 2},
        "--num-critic-only-steps is 2 .* 4;",
    ),
    (
        {"critic_warmup": {"w_epoch": 2}, "num_critic_only_steps": 2, **GROUP},
        "critic_warmup .* --advantage-estimator",
    ),
    (
        {"custom_convert_samples_to_train_data_path": None},
        "--custom-convert-samples-to-train-data-path rollout",
    ),
    ({"use_dynamic_batch_size": False}, "--use-dynamic-batch-size"),
    ({"rollout_max_response_len": None}, "--rollout-max-response-len is missing"),
    ({"rollout_temperature": 0.0}, "--rollout-temperature 0 must be above 0"),
    ({"rollout_max_context_len": 30}, "--rollout-max-context-len 30 leaves no room"),
    ({"memory": {"kind": "inline_notes"}}, "response-len 32 tokens .* memory.notes_chars: 400"),
    (
        {"memory": {"kind": "inline_notes", "notes_chars": 24}, "rollout_max_context_len": 38},
        "memory.notes_chars: 24 .* --rollout-max-context-len 38",
    ),
    ({"sglang_context_length": 4000}, "--sglang-context-length 4000"),
    (
        {"advantage_estimator": "grpo", "custom_megatron_init_path": None},
        "--custom-advantage-function-path",
    ),
    ({"over_sampling_batch_size": 48}, "--over-sampling-batch-size"),
    ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset"),
    (
        {"data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer"},
        "--data-source-path is missing",
    ),
    (
        {"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"},
        "nothing that plays turns",
    ),
    (
        {"custom_advantage_function_path": "my.function"},
        "would replace it, drop one of them .in the actor",
    ),
    ({"fp16": True}, "--fp16"),
    (
        {"data_parallel_size": 3, "micro_batch_size": 1},
        "--global-batch-size 8 is not a multiple of 3, the data-par",
    ),
    ({"kl_coef": 0.001, **GROUP}, "--kl-coef 0.001: .* --kl-loss-coef"),
    ({"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k1"}, "--kl-loss-type k1"),
    (
        {**GROUP, "advantage_estimator": "gspo", "custom_advantage_function_path": "a.b"},
        "gspo weighs each sample as one",
    ),
    (GROUP, "whole episodes, and --rollout-function-path rollout.fixed_turn"),
    ({"gae_form": "no_such_package.form"}, "gae_form: no_such_package cannot be imported"),
    ({"group_estimator": "rloo"}, "group_estimator: rloo .* --advantage-estima"),
    ({**GROUP, "advantage_estimator": "ppo"}, "a critic that advantage.group.compute_advantages"),
    (
        {**GROUP, "custom_advantage_function_path": HOOK},
        "--advantage-estimator grpo trains no critic",
    ),
    (
        {"use_rollout_logprobs": True, "kl_coef": 0.1, "megatron_config_path": None, "save": None},
        "its first step",
    ),
    ({"loss_type": "sft_loss"}, "--loss-type sft_loss would imitate"),
    ({"loss_type": "custom_loss"}, "needs --custom-loss-function-path"),
    (
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "policy_loss": "dis"},
        "policy_loss: dis in the",
    ),
    ({"use_opd": True, "opd_type": "sglang"}, "--opd-type sglang"),
    ({"megatron_config_path": None}, "is the folder of both actor and critic"),
]


@pytest.mark.parametrize(("overrides", "words"), FIXED_TURN_FAULTS)
def test_fixed_turn_batches_are_refused_before_anything_is_played(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    args = rollout_args(tmp_path, **{**HOOKS, **overrides})
    with pytest.raises(ConfigError, match=words):
        EpisodeSource(args)


def test_a_role_with_static_micro_batches_is_refused(tmp_path: Path) -> None:
    roles = tmp_path / "roles.yaml"
    overrides = {"save": str(tmp_path / "critic"), "use_dynamic_batch_size": False}
    roles.write_text(
        json.dumps({"megatron": [{"name": "default", "role": "critic", "overrides": overrides}]})
    )
    with pytest.raises(ConfigError, match="missing for the critic"):
        EpisodeSource(rollout_args(tmp_path, **HOOKS, megatron_config_path=str(roles)))


def test_functions_that_replace_the_evaluation_or_the_loss_are_named(tmp_path: Path) -> None:
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": "my.loss"}
    args = rollout_args(tmp_path, **HOOKS, **custom, eval_function_path="my.evaluation")
    evaluation, loss = flags_without_effect(args, ())
    assert "--eval-function-path my.evaluation plays the evaluations" in evaluation
    assert "my.loss replaces the policy loss" in loss
    EpisodeSource(args)


TABLE = yaml.safe_load(
    (REPO / "rollout" / "bridge" / "slime_flags.yaml").read_text(encoding="utf-8")
)


def decisions() -> list[tuple[str, str]]:
    """Every flag in the table, with the decision about it."""
    found: list[tuple[str, str]] = []
    for decision, content in TABLE.items():
        words = content if isinstance(content, str) else " ".join(row["flags"] for row in content)
        found += [(flag, decision) for flag in words.split()]
    return found


def test_every_flag_of_slimes_parser_has_one_decision() -> None:
    """The recorded flags; a slow test compares them with the checkout's own parser."""
    flags = [flag for flag, _ in decisions()]
    assert len(flags) == len(set(flags))
    assert recorded_own_flags() - set(flags) == set(), (
        "decide about these flags in rollout/bridge/slime_flags.yaml"
    )
    assert set(flags) - recorded_own_flags() == set(), "slime has no such flags"


def test_the_docs_name_every_flag_that_is_refused_or_warned_about() -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (REPO / "docs").glob("slime*.md"))
    assert [
        flag
        for flag, decision in decisions()
        if decision in ("refused", "warned") and f"`{flag}" not in page
    ] == []


WAYS = {
    FIXED_TURN: {"rollout_function_path": FIXED_TURN},
    CONTINUOUS: {"rollout_function_path": CONTINUOUS},
    GENERATE: EPISODES,
}
"""How episodes are played, beside the other hooks."""
OTHER_HOOKS = {
    "source": "data_source_path",
    "converter": "custom_convert_samples_to_train_data_path",
    "patch": "custom_megatron_init_path",
}
ROWS = [(decision, row) for decision in ("refused", "warned") for row in TABLE[decision]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("decision", "row"), ROWS, ids=[f"{name}-{row['flags'].split()[0]}" for name, row in ROWS]
)
def test_each_flag_of_the_table_gets_its_sentence_beside_its_hook_and_not_without(
    tmp_path: Path, decision: str, row: dict[str, str], way: str
) -> None:
    applies = row["hook"] not in ("batches", "chains") or way != GENERATE
    for flag in row["flags"].split():
        sentence = f"{flag} {row['why']}"
        args = rollout_args(tmp_path, **{**HOOKS, **WAYS[way], flag[2:].replace("-", "_"): "given"})
        if decision == "refused" and applies:
            with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
                check_flags(args, load_settings(args))
        elif decision == "refused":
            check_flags(args, load_settings(args))
        else:
            assert flags_without_effect(args, [flag]) == [sentence] * applies
            if row["hook"] in OTHER_HOOKS:
                setattr(args, OTHER_HOOKS[row["hook"]], None)
                assert flags_without_effect(args, [flag]) == []


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"use_dynamic_batch_size": False}, "--use-dynamic-batch-size"),
        ({"critic_warmup": {"w_epoch": 2}}, "--rollout-function-path rollout.fixed_turn"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator is gspo"),
        ({"kl_coef": 0.001, **SLIMES_GRPO}, "--kl-coef 0.001: --advantage-estimator grpo"),
        (
            {"custom_convert_samples_to_train_data_path": None, **GROUP},
            "are computed from its table",
        ),
        (
            {"history": "full", "samples": "turns", "use_dynamic_batch_size": False},
            "samples: turns make several",
        ),
        ({"history": "full", "samples": "turns", "log_passrate": True}, "--log-passrate expects"),
    ],
)
def test_wrong_flags_for_whole_episodes_are_refused(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    args = rollout_args(tmp_path, **{**HOOKS, **EPISODES, **overrides})
    with pytest.raises(ConfigError, match=words):
        check_flags(args, load_settings(args))


SLIMES_BATCHES = {
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "use_dynamic_batch_size": False,
    "over_sampling_batch_size": 48,
    "partial_rollout": True,
    "log_passrate": True,
    "data_parallel_size": 4,
    "micro_batch_size": 2,
}
UNCONVERTED = {"custom_convert_samples_to_train_data_path": None, "history": "full"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {**GROUP, "custom_advantage_function_path": "x.y"},
        {"debug_rollout_only": True, "custom_megatron_init_path": None, **UNCONVERTED},
        {**EPISODES, **SLIMES_GRPO, **UNCONVERTED, **SLIMES_BATCHES},
        {**EPISODES, **SLIMES_GRPO, **UNCONVERTED, "custom_megatron_init_path": INSTALL},
        {**EPISODES, **GROUP, "custom_megatron_init_path": INSTALL},
    ],
    ids=[
        "fixed turns",
        "own advantages",
        "no training",
        "slime's batches",
        "slime's estimator",
        "group estimator",
    ],
)
def test_good_flags_pass(tmp_path: Path, overrides: dict[str, Any]) -> None:
    EpisodeSource(rollout_args(tmp_path, **{**HOOKS, **overrides}))


def weights(folder: Path) -> str:
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return str(folder)


SEPARATE = {
    **GROUP,
    **EPISODES,
    "offload_train": False,
    "colocate": False,
    "update_weight_transport": "nccl",
}


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ({"use_kl_loss": True}, "reference"),
        ({"use_kl_loss": True, "update_weight_transport": "disk", "colocate": True}, "reference"),
        ({"use_opd": True, "opd_type": "megatron", "use_kl_loss": True}, "teacher"),
        ({"use_kl_loss": True, "custom_megatron_init_path": INSTALL}, None),
        ({"use_kl_loss": True, "colocate": True}, None),
        ({"use_kl_loss": True, "keep_old_actor": True}, None),
        ({"use_kl_loss": True, "load": "ref"}, None),
        ({"use_kl_loss": True, "load": "empty"}, None),
        ({"use_kl_loss": False}, None),
    ],
)
def test_a_run_whose_engines_would_start_with_another_models_weights_is_refused_without_the_patch(
    tmp_path: Path, overrides: dict[str, Any], held: str | None
) -> None:
    folders = {name: weights(tmp_path / name) for name in ("actor", "ref", "teach")} | {
        "empty": str(tmp_path)
    }
    start = folders[overrides.get("load", "actor")]
    given = {
        "load": start,
        "ref_load": folders["ref"],
        "opd_teacher_load": folders["teach"],
        "save": None,
    }
    args = rollout_args(tmp_path, **{**HOOKS, **SEPARATE, **overrides, **given})
    if held is None:
        EpisodeSource(args)
        return
    with pytest.raises(
        ConfigError, match=f"the {held}'s weights .* give --custom-megatron-init-path {INSTALL}"
    ):
        EpisodeSource(args)


def test_preflight_warns_of_a_kl_loss_without_coefficient_and_reads_the_actors_own_flags(
    tmp_path: Path,
) -> None:
    args = rollout_args(tmp_path, **HOOKS, use_kl_loss=True, kl_loss_coef=0.0)
    [sentence] = flags_without_effect(args, ())
    assert "--kl-loss-coef 0 (the default) only logs the KL" in sentence
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron: [{role: actor, overrides: {kl_loss_coef: 0.01, kl_loss_type: k1}}]")
    args.megatron_config_path = str(roles)
    assert flags_without_effect(args, ()) == []
    with pytest.raises(ConfigError, match="--kl-loss-type k1"):
        EpisodeSource(args)
    unbiased = {"use_kl_loss": True, "kl_loss_coef": 0.01, "use_unbiased_kl": True}
    EpisodeSource(rollout_args(tmp_path, **HOOKS, **unbiased))


def test_preflight_makes_an_environment_of_every_task(tmp_path: Path) -> None:
    check(rollout_args(tmp_path, **HOOKS))
    with pytest.raises(ConfigError, match="max_lenght"):
        check(rollout_args(tmp_path, **HOOKS, env={"max_lenght": 3}))
    with pytest.raises(ConfigError, match="--global-batch-size 7"):
        check(rollout_args(tmp_path, **HOOKS, global_batch_size=7))


def test_preflight_without_slime_asks_for_a_checkout_on_pythonpath() -> None:
    assert not HAS_SLIME
    with pytest.raises(SystemExit, match=r"^error: .* PYTHONPATH$"):
        main()
