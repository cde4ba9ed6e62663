"""Checks of the preflight that need no slime; the others are in tests/scripts/test_preflight.py."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.preflight import check, check_memory_saver, check_whitening
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.vision import vlm_folder

SLICED = {"normalize_advantages": True, "context_parallel_size": 2}
SLICED["custom_advantage_function_path"] = "advantage.group.compute_advantages"


@pytest.mark.parametrize("whitens_all_ranks", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"normalize_advantages": False},
        {"context_parallel_size": 1},
        {"custom_advantage_function_path": None},
        {"custom_advantage_function_path": "my.advantages"},
    ],
)
def test_our_advantages_are_whitened_over_whole_sequences(
    other: dict[str, object], whitens_all_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(whitens_all_ranks=whitens_all_ranks)
    monkeypatch.setattr("rollout.preflight.find_slime", lambda: found)
    args = Namespace(**{**SLICED, **other})
    if other or whitens_all_ranks:
        check_whitening(args)
        return
    with pytest.raises(
        ConfigError, match="leave out --normalize-advantages, or give --context-parallel-size 1"
    ):
        check_whitening(args)


REGION = """
    @contextmanager
    def _with_region_config(self, tag: str, enable_cpu_backup: bool):
        {first}
        original_enable_cpu_backup = self._binary_wrapper.cdll.tms_get_enable_cpu_backup()
"""
"""Part of torch_memory_saver 0.0.9.post1 with its first statement, or with the one of slime's
fork."""
REFUSES = "assert not self._binary_wrapper.cdll.tms_get_interesting_region()"
NESTS = "orig_interesting_region = self._binary_wrapper.cdll.tms_get_interesting_region()"


def install_memory_saver(folder: Path, first: str) -> Path:
    """A package of that name, which cannot be imported without CUDA's libraries."""
    package = folder / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13')")
    (package / "entrypoint.py").write_text(REGION.format(first=first))
    return package


def test_a_memory_saver_without_nested_regions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install_memory_saver(tmp_path, REFUSES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=f"{package} refuses the nested memory regions .*TMS_COMMIT"
    ):
        check_memory_saver(Namespace(offload_train=True, debug_rollout_only=False))
    check_memory_saver(Namespace(offload_train=False, debug_rollout_only=False))
    check_memory_saver(Namespace(offload_train=True, debug_rollout_only=True))


def test_a_memory_saver_with_nested_regions_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_memory_saver(tmp_path, NESTS)
    monkeypatch.syspath_prepend(tmp_path)
    check_memory_saver(Namespace(offload_train=True, debug_rollout_only=False))


VISION_SPEC = ["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"]
TEXT_SPEC = ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]


def shown(folder: Path, *, vlm: Any, sees: bool, spec: list[str] | None, **more: Any) -> Namespace:
    """A run of Crafter with a checkpoint that sees or reads."""
    checkpoint = vlm_folder() if sees else folder / "model"
    if not sees:
        chatml_tokenizer().save_pretrained(checkpoint)
    env = {
        "rollout_interaction_env_path": "envs.crafter",
        "tasks": ["default"],
        "env": {"vlm": vlm},
    }
    flags = {
        "hf_checkpoint": str(checkpoint),
        "spec": spec,
        "data_source_path": "rollout.data_source.EpisodeSource",
    }
    return rollout_args(folder, 1, **{**env, **flags, **more})


def test_pictures_need_a_checkpoint_with_an_image_processor(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="task 'default' shows pictures .* has no image processor"
    ):
        check(shown(tmp_path, vlm="only", sees=False, spec=VISION_SPEC))


@pytest.mark.parametrize(
    ("spec", "words"), [(TEXT_SPEC, "get_qwen3_5_spec describes"), (None, "without --spec")]
)
def test_pictures_need_a_training_model_that_sees(
    tmp_path: Path, spec: list[str] | None, words: str
) -> None:
    """The checkpoint sees, as every Qwen3.5 does, but the script describes its text model."""
    with pytest.raises(
        ConfigError, match=f"{words}.* a text model, which cannot train on them; give --spec"
    ):
        check(shown(tmp_path, vlm=True, sees=True, spec=spec))
    assert check(shown(tmp_path, vlm=True, sees=True, spec=spec, debug_rollout_only=True)) == []


def test_a_model_that_sees_may_be_shown_pictures_or_text(tmp_path: Path) -> None:
    assert check(shown(tmp_path, vlm=True, sees=True, spec=VISION_SPEC)) == []
    assert check(shown(tmp_path, vlm=False, sees=False, spec=None)) == []


def test_a_data_set_with_pictures_needs_a_model_that_sees(tmp_path: Path) -> None:
    """run_geo3k_vlm.sh: slime's own data source, so that no environment of a YAML's task is
    tried."""
    more = {
        "data_source_path": "slime.rollout.data_source.RolloutDataSource",
        "prompt_data": "train.parquet",
    }
    more |= {
        "custom_generate_function_path": "rollout.generate.generate",
        "multimodal_keys": {"image": "images"},
    }
    args = shown(tmp_path, vlm=False, sees=False, spec=VISION_SPEC, history="full", **more)
    with pytest.raises(
        ConfigError, match="--multimodal-keys names pictures, but .* has no image processor"
    ):
        check(args)
