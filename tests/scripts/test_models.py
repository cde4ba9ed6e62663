"""Models and data sets: what is complete is left alone, what was interrupted goes on, what is empty
is refused."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub._local_folder import get_local_download_paths

from scripts.launcher.convert import export
from scripts.launcher.models import VISION_MODELS, find_shape, is_complete, read_shape
from scripts.launcher.variables import Paths
from slime_verlog import ConfigError
from tests.fixtures.checkouts import slime_checkouts
from tests.scripts.conftest import Machine, by_flag


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for name in ("config.json", "tokenizer_config.json", *shards):
        (folder / name).write_text("{}")
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_model_is_complete_with_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    for path in folder.iterdir():
        text = path.read_text()
        path.unlink()
        assert not is_complete(folder), path
        path.write_text(text)
        assert is_complete(folder)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "model.safetensors").write_text("")
    assert is_complete(folder), "one file needs no index"


def test_a_download_that_was_cut_in_the_middle_of_a_file_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    paths = get_local_download_paths(folder, "model-00002-of-00002.safetensors")
    partial = paths.incomplete_path("0123456789abcdef")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text("half of it")
    assert not is_complete(folder)


def test_a_model_is_prepared_once_and_a_dry_run_does_nothing(machine: Machine) -> None:
    machine.install("hf", 'echo "hf $*" >> "$HOME/calls"')
    shown = machine.run("prepare_model.sh", "Qwen2.5-3B-Instruct", "--dry-run")
    folder = machine.home / "models" / "Qwen2.5-3B-Instruct"
    assert (
        shown.returncode == 0
        and f"hf download Qwen/Qwen2.5-3B-Instruct --local-dir {folder}\n" in shown.stdout
    )
    assert (
        "convert_hf_to_torch_dist.py --swiglu" in shown.stdout
        and not (machine.home / "calls").exists()
    )
    write_model(folder)
    reference = folder.with_name(f"{folder.name}_torch_dist")
    (reference / "release").mkdir(parents=True)
    unfinished = machine.run("prepare_model.sh", folder.name, "--dry-run").stdout
    assert "hf download" not in unfinished and "convert_hf_to_torch_dist.py" in unfinished
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    assert (
        machine.run("prepare_model.sh", folder.name).stdout == f"ready: {folder} and {reference}\n"
    )


def test_training_refuses_an_empty_reference_folder(machine: Machine) -> None:
    (machine.slime / "train.py").write_text("")
    (machine.home / "models" / "Qwen2.5-3B-Instruct_torch_dist").mkdir(parents=True)
    done = machine.run("run_babyai.sh")
    assert (
        done.returncode == 2
        and "holds no finished checkpoint; run: bash scripts/prepare_model.sh" in done.stderr
    )


@pytest.mark.parametrize("model", ["Qwen2.5-VL-7B-Instruct", "Qwen3.5-122B-A10B"])
def test_a_model_that_slime_does_not_describe_with_pictures_is_refused(
    machine: Machine, model: str
) -> None:
    with pytest.raises(ConfigError, match=f"{model} .*: Qwen3.5-0.8B"):
        find_shape(model, str(machine.slime), images=True)


def test_a_shape_that_cannot_be_read_is_refused(machine: Machine) -> None:
    (machine.slime / "scripts/models/broken.sh").write_text("MODEL_ARGS=($UNSET)")
    with pytest.raises(ConfigError, match="broken.sh .*UNSET"):
        read_shape(
            find_shape("broken", str(machine.slime), images=False), str(machine.slime), dry_run=True
        )
    with pytest.raises(ConfigError, match="no .*/none.sh; set SLIME_PATH"):
        read_shape(
            find_shape("none", str(machine.slime), images=False), str(machine.slime), dry_run=False
        )


def test_crafter_with_pictures_is_ppo_from_a_conversion_that_sees(machine: Machine) -> None:
    flags = machine.flags("run_crafter_vlm.sh")
    assert flags["--spec"] == ["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"]
    assert flags["--advantage-estimator"] == ["ppo"]
    assert flags["--rollout-function-path"] == ["rollout.fixed_turn.generate_rollout"]
    config = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())
    assert config["env"]["vlm"] is True and config["history"] == "window"
    prepared = machine.run("prepare_model.sh", "Qwen3.5-4B", "--images", "--dry-run").stdout
    assert (
        f"--save {flags['--ref-load'][0]}" in prepared
        and "get_qwen3_5_vl_model_provider" in prepared
    )
    as_text = machine.run("prepare_model.sh", "Qwen3.5-4B", "--dry-run").stdout
    assert "get_qwen3_5_vl_model_provider" not in as_text and flags["--ref-load"][0] not in as_text


@pytest.mark.parametrize("model", VISION_MODELS)
def test_this_slime_has_what_it_takes_to_train_with_pictures(machine: Machine, model: str) -> None:
    """The files of the first checkout that SLIME_PATH names, and the model provider that the script
    puts into them."""
    if not (checkouts := slime_checkouts()):
        pytest.skip("set SLIME_PATH to a slime checkout")
    path = checkouts[0]
    job = machine.build("run_crafter_vlm.sh", "--model", model, SLIME_PATH=str(path))
    flags = by_flag(job.words)
    module, provider = flags["--spec"]
    assert f"def {provider}(" in (path / f"{module.replace('.', '/')}.py").read_text()
    assert int(flags["--num-layers"][0]) > 0


@pytest.fixture
def saved(tmp_path: Path) -> Paths:
    """A run with two steps in tmp_path/run, and its model."""
    for step in (19, 39):
        (tmp_path / "run" / "actor" / f"iter_{step:07d}").mkdir(parents=True)
    (tmp_path / "run" / "actor" / "latest_checkpointed_iteration.txt").write_text("39")
    model = tmp_path / "models" / "Qwen2.5-3B-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 151936}}))
    return Paths(MODELS=str(tmp_path / "models"))  # type: ignore[call-arg]


@pytest.mark.parametrize(("words", "step"), [([], 39), (["19"], 19)])
def test_a_run_is_exported_at_its_last_step_or_at_a_given_one(
    tmp_path: Path, saved: Paths, capsys: pytest.CaptureFixture[str], words: list[str], step: int
) -> None:
    run = tmp_path / "run"
    export(run, "Qwen2.5-3B-Instruct", [*words, "--dry-run"], saved)
    printed = capsys.readouterr().out
    assert f"--input-dir {run}/actor/iter_{step:07d} --output-dir {run}/hf/{step}" in printed
    assert f"--origin-hf-dir {tmp_path}/models/Qwen2.5-3B-Instruct --vocab-size 151936" in printed


@pytest.mark.parametrize(
    ("step", "words"), [("29", "iter_0000029"), ("last", "STEP must be the number of a step")]
)
def test_a_step_that_was_not_saved_is_refused(
    tmp_path: Path, saved: Paths, step: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        export(tmp_path / "run", "Qwen2.5-3B-Instruct", [step], saved)
