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


def test_our_advantages_are_whitened_over_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slime = SimpleNamespace(whitens_all_ranks=True)
    monkeypatch.setattr("rollout.preflight.find_slime", lambda: slime)
    check_whitening(Namespace(**SLICED))
    slime.whitens_all_ranks = False
    for other in (
        {"normalize_advantages": False},
        {"context_parallel_size": 1},
        {"custom_advantage_function_path": None},
        {"custom_advantage_function_path": "my.advantages"},
    ):
        check_whitening(Namespace(**{**SLICED, **other}))
    with pytest.raises(
        ConfigError, match="leave out --normalize-advantages, or give --context-parallel-size 1"
    ):
        check_whitening(Namespace(**SLICED))


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


def test_a_memory_saver_without_nested_regions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name, which cannot be imported without CUDA's libraries."""
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13')")
    (package / "entrypoint.py").write_text(REGION.format(first=REFUSES))
    monkeypatch.syspath_prepend(tmp_path)
    trains = Namespace(offload_train=True, debug_rollout_only=False)
    with pytest.raises(
        ConfigError, match=f"{package} refuses the nested memory regions .*TMS_COMMIT"
    ):
        check_memory_saver(trains)
    check_memory_saver(Namespace(offload_train=False, debug_rollout_only=False))
    check_memory_saver(Namespace(offload_train=True, debug_rollout_only=True))
    (package / "entrypoint.py").write_text(REGION.format(first=NESTS))
    check_memory_saver(trains)


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


DATA_SET = {
    "data_source_path": "slime.rollout.data_source.RolloutDataSource",
    "prompt_data": "train.parquet",
    "custom_generate_function_path": "rollout.generate.generate",
    "multimodal_keys": {"image": "images"},
    "history": "full",
}
"""As in run_geo3k_vlm.sh: slime's own data source, so that no environment of a YAML's task is
tried."""
TEXT_MODEL = "a text model, which cannot train on them; give --spec"


@pytest.mark.parametrize(
    ("vlm", "sees", "spec", "more", "words"),
    [
        ("only", False, VISION_SPEC, {}, "task 'default' shows pictures .* has no image processor"),
        # The checkpoint sees, as every Qwen3.5 does, but the script describes its text model.
        (True, True, TEXT_SPEC, {}, f"get_qwen3_5_spec describes.* {TEXT_MODEL}"),
        (True, True, None, {}, f"without --spec.* {TEXT_MODEL}"),
        (False, False, VISION_SPEC, DATA_SET, "--multimodal-keys names .* has no image processor"),
    ],
)
def test_pictures_need_an_image_processor_and_a_training_model_that_sees(
    tmp_path: Path, vlm: Any, sees: bool, spec: list[str] | None, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(shown(tmp_path, vlm=vlm, sees=sees, spec=spec, **more))


@pytest.mark.slow
def test_a_model_that_sees_may_be_shown_pictures_or_text(tmp_path: Path) -> None:
    assert check(shown(tmp_path, vlm=True, sees=True, spec=VISION_SPEC)) == []
    assert (
        check(shown(tmp_path, vlm=True, sees=True, spec=TEXT_SPEC, debug_rollout_only=True)) == []
    )
    assert check(shown(tmp_path, vlm=False, sees=False, spec=None)) == []
