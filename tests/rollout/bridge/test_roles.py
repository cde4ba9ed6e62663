"""`--megatron-config-path`: each role needs its own save folder, both compute the same
advantages."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.bridge.checkpoints import check_start_weights
from rollout.bridge.checks import FIXED_TURN, INSTALL, SOURCE
from rollout.bridge.roles import check_roles, role_args
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from rollout.preflight import flags_without_effect
from tests.fixtures.rollout_args import rollout_args

PLAYS: dict[str, Any] = {
    "rollout_function_path": FIXED_TURN,
    "data_source_path": SOURCE,
    "custom_megatron_init_path": INSTALL,
    "use_dynamic_batch_size": True,
}


def make_args(folder: Path, critic: dict[str, Any] | None = None, **flags: Any) -> Namespace:
    path = folder / "roles.yaml"
    entries = [] if critic is None else [{"name": "default", "role": "critic", "overrides": critic}]
    path.write_text(yaml.safe_dump({"megatron": entries}))
    values = {
        "save": str(folder / "actor"),
        "advantage_estimator": "ppo",
        "megatron_config_path": str(path),
    }
    return Namespace(**{**values, **flags})


@pytest.mark.parametrize("critic", [None, {"lr": 1e-5}, {"save": "{folder}/x/../actor"}])
def test_one_save_folder_for_both_roles_is_refused(
    tmp_path: Path, critic: dict[str, Any] | None
) -> None:
    if critic and "save" in critic:
        critic = {"save": critic["save"].format(folder=tmp_path)}
    with pytest.raises(ConfigError, match="both actor and critic"):
        check_roles(make_args(tmp_path, critic))


def test_two_folders_pass_and_so_does_a_run_that_saves_nothing_or_has_no_critic(
    tmp_path: Path,
) -> None:
    check_roles(make_args(tmp_path, {"save": str(tmp_path / "critic")}))
    check_roles(make_args(tmp_path, None, save=None))
    check_roles(make_args(tmp_path, None, advantage_estimator="grpo"))


def test_megatrons_own_rotation_is_refused_with_two_roles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoints_kept"):
        check_roles(make_args(tmp_path, {"save": "elsewhere"}, save_retain_interval=20))


def test_a_critic_of_another_family_is_refused(tmp_path: Path) -> None:
    for name, vocabulary in {"policy": {"a": 0, "b": 1}, "other": {"b": 0, "a": 1}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": vocabulary}})
        )
    flags = {"hf_checkpoint": str(tmp_path / "policy"), "save": None}
    check_roles(make_args(tmp_path, {}, **flags))
    with pytest.raises(ConfigError, match="other has another vocabulary"):
        check_roles(make_args(tmp_path, {"hf_checkpoint": str(tmp_path / "other")}, **flags))


def test_tied_embeddings_with_pipeline_stages_need_a_role_for_the_critic(tmp_path: Path) -> None:
    flags = {
        "untie_embeddings_and_output_weights": False,
        "pipeline_model_parallel_size": 2,
        "save": None,
    }
    with pytest.raises(ConfigError, match="pipeline parallelism needs --megatron-config-path"):
        check_roles(make_args(tmp_path, None, **flags, megatron_config_path=None))
    check_roles(make_args(tmp_path, None, **flags))


@pytest.mark.parametrize("content", ["", "megatron: [critic]", "megatron: ["])
def test_a_file_that_is_not_a_list_of_roles_is_refused(tmp_path: Path, content: str) -> None:
    args = make_args(tmp_path)
    Path(args.megatron_config_path).write_text(content)
    with pytest.raises(ConfigError, match="--megatron-config-path"):
        role_args(args, "critic")


def test_ppo_begins_behind_the_seeds_of_its_pretrained_critic(tmp_path: Path) -> None:
    pretrained, own = tmp_path / "pretrained", tmp_path / "critic"
    collecting = make_args(tmp_path, {"save": str(pretrained)})
    flags = {name: value for name, value in vars(collecting).items() if name != "save"}
    batches = {
        "value_pretraining": {"batches": 2},
        "n_env": 10,
        "num_rollout": 2,
        "num_critic_only_steps": 2,
    }
    source = EpisodeSource(rollout_args(tmp_path, **flags, **batches, **PLAYS, seed_start=7))
    source.end_batch(
        0, [{"next_episode": 12, "episode": None}, {"next_episode": 9, "episode": None}]
    )
    source.save(0)
    assert json.loads((pretrained / "slime_verlog_seeds.json").read_text()) == {
        "first": 7,
        "next": 19,
    }

    make_args(tmp_path, {"load": str(pretrained), "save": str(own)})
    first_seed = lambda source: source.episode(0).env.metadata["seed"]
    ppo = EpisodeSource(rollout_args(tmp_path, **flags, **PLAYS, seed_start=7))
    assert first_seed(ppo) == 19
    assert (
        first_seed(EpisodeSource(rollout_args(tmp_path, **flags, **PLAYS, seed_start=100))) == 100
    )
    ppo.save(1)
    make_args(tmp_path, {"load": str(own), "save": str(own)})
    resumed = EpisodeSource(
        rollout_args(tmp_path, **flags, **PLAYS, seed_start=7, load=str(tmp_path / "save"))
    )
    resumed.load(1)
    assert first_seed(resumed) == 19


def test_the_critic_must_start_from_a_finished_megatron_checkpoint(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    args = make_args(tmp_path, {"load": str(reference)}, load=None, ref_load=str(reference))
    with pytest.raises(ConfigError, match="the critic starts from .*reference"):
        check_start_weights(args)
    (reference / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load Hugging Face weights"):
        check_start_weights(args)
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    check_start_weights(args)


def test_a_reference_without_weights_is_refused_without_a_critic_too(tmp_path: Path) -> None:
    args = make_args(tmp_path, None, advantage_estimator="grpo", ref_load=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="--ref-load .*interrupted"):
        check_start_weights(args)


def test_discounts_given_to_one_role_only_are_named(tmp_path: Path) -> None:
    install = {"custom_megatron_init_path": "advantage.patch.install"}
    args = make_args(tmp_path, {"gamma_step": 0.5, "lambd": 0.5}, **install)
    warned = flags_without_effect(args, ())
    assert (
        len(warned) == 2 and "lambd for the critic" in warned[0] and "gamma_step 0.5" in warned[1]
    )
    assert flags_without_effect(make_args(tmp_path, {"lr": 1.0}, **install), ()) == []


def test_sizes_of_one_role_that_slime_ignores_are_named_and_another_layout_is_refused(
    tmp_path: Path,
) -> None:
    install = {"custom_megatron_init_path": "advantage.patch.install"}
    overrides = {
        "save": str(tmp_path / "critic"),
        "global_batch_size": 64,
        "max_tokens_per_gpu": 512,
    }
    warned = flags_without_effect(make_args(tmp_path, overrides, **install), ())
    assert [sentence.split()[2] for sentence in warned] == [
        "global_batch_size",
        "max_tokens_per_gpu",
    ]
    layout = {"save": str(tmp_path / "critic"), "tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="sets tensor_model_parallel_size for one role"):
        check_roles(make_args(tmp_path, layout, tensor_model_parallel_size=4))
    check_roles(make_args(tmp_path, layout, tensor_model_parallel_size=2))


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    """A checkpoint in the format that Megatron writes."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save(state, storage_writer=FileSystemWriter(folder / "iter_0000007"), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return str(folder)


BODY = {"embedding.word_embeddings.weight": (320, 8), "decoder.final_layernorm.weight": (8,)}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({**BODY, "output_layer.weight": (1, 8), "output_layer.bias": (1,)}, None),
        (
            {
                **BODY,
                "language_model.output_layer.weight": (1, 8),
                "language_model.output_layer.bias": (1,),
            },
            None,
        ),
        (
            {**BODY, "output_layer.weight": (1, 8), "embedding.word_embeddings.weight": (384, 8)},
            None,
        ),
        (BODY, "no value head .*None"),
        ({**BODY, "language_model.output_layer.weight": (320, 8)}, r"no value head .*\(320, 8\)"),
        (
            {**BODY, "output_layer.weight": (1, 6), "decoder.final_layernorm.weight": (6,)},
            r"--ref-load .*decoder.final_layernorm.weight has shape \(6,\), not \(8,\)",
        ),
    ],
    ids=[
        "a critic",
        "of images",
        "other padding of the vocabulary",
        "no output layer",
        "a policy",
        "another model",
    ],
)
def test_a_pretrained_critic_must_have_a_value_head_and_the_references_shape(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], words: str | None
) -> None:
    heads = {"output_layer.weight": (320, 8), "language_model.output_layer.weight": (320, 8)}
    reference = write_checkpoint(tmp_path / "reference", {**BODY, **heads})
    critic = write_checkpoint(tmp_path / "critic", shapes)
    args = make_args(tmp_path, {"load": critic}, load=None, ref_load=reference)
    if words is None:
        check_start_weights(args)
        return
    with pytest.raises(ConfigError, match=words):
        check_start_weights(args)
