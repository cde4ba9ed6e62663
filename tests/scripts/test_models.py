"""Models and data sets: what is complete is left alone, what was interrupted goes on, what is empty is refused."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from huggingface_hub._local_folder import get_local_download_paths

from tests.scripts.conftest import QWEN_3B, REPO, Command, Fresh, by_flag, train_flags

TOOLS = """
hf() { echo "hf $*"; }
python3() { echo "python3 $*"; }
env() { shift; "$@"; }
export -f hf python3 env
"""


def prepare(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`prepare_model.sh` with downloads and conversions that only say that they were asked for."""
    models = tmp_path / "slime" / "scripts" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (models / "qwen2.5-3B.sh").write_text(QWEN_3B)
    command = f"{TOOLS} bash {REPO}/scripts/prepare_model.sh {' '.join(options)}"
    environment = {"PATH": os.environ["PATH"], "SLIME_PATH": str(tmp_path / "slime"), "MODELS": str(tmp_path)}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for name in ("config.json", "tokenizer_config.json", *shards):
        (folder / name).write_text("{}")
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_complete_model_is_neither_downloaded_nor_converted_again(tmp_path: Path) -> None:
    write_model(tmp_path / "Qwen2.5-3B-Instruct")
    reference = tmp_path / "Qwen2.5-3B-Instruct_torch_dist"
    reference.mkdir()
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    done = prepare(tmp_path, "Qwen2.5-3B-Instruct")
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == ["ready:"]


def test_a_model_in_one_file_is_complete_without_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2.5-3B-Instruct"
    write_model(folder)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "model.safetensors").write_text("")
    assert "hf download" not in prepare(tmp_path, "Qwen2.5-3B-Instruct").stdout


@pytest.mark.parametrize(
    "missing",
    ["config.json", "tokenizer_config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
)
def test_a_download_that_lacks_a_file_goes_on(tmp_path: Path, missing: str) -> None:
    write_model(tmp_path / "Qwen2.5-3B-Instruct")
    (tmp_path / "Qwen2.5-3B-Instruct" / missing).unlink()
    done = prepare(tmp_path, "Qwen2.5-3B-Instruct")
    assert f"hf download Qwen/Qwen2.5-3B-Instruct --local-dir {tmp_path}/Qwen2.5-3B-Instruct" in done.stdout


def test_a_download_that_was_cut_in_the_middle_of_a_file_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2.5-3B-Instruct"
    write_model(folder)
    paths = get_local_download_paths(folder, "model-00002-of-00002.safetensors")
    partial = paths.incomplete_path("0123456789abcdef")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text("half of it")
    assert "hf download" in prepare(tmp_path, "Qwen2.5-3B-Instruct").stdout


def test_a_conversion_that_did_not_end_is_made_again(tmp_path: Path) -> None:
    write_model(tmp_path / "Qwen2.5-3B-Instruct")
    (tmp_path / "Qwen2.5-3B-Instruct_torch_dist" / "release").mkdir(parents=True)
    assert "convert_hf_to_torch_dist.py" in prepare(tmp_path, "Qwen2.5-3B-Instruct").stdout


def test_a_dry_run_shows_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    done = prepare(tmp_path, "Qwen2.5-3B-Instruct", "--dry-run")
    assert done.returncode == 0 and "hf download" in done.stdout and "convert_hf_to_torch_dist.py" in done.stdout
    assert not (tmp_path / "Qwen2.5-3B-Instruct").exists()


def test_training_refuses_an_empty_reference_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "scripts/models").mkdir(parents=True)
    (tmp_path / "scripts/models/qwen2.5-3B.sh").write_text(QWEN_3B)
    (tmp_path / "Qwen2.5-3B-Instruct_torch_dist").mkdir()
    environment = {"SLIME_PATH": str(tmp_path), "MODELS": str(tmp_path), "OUTPUT": str(tmp_path / "out")}
    done = subprocess.run(
        ["bash", str(REPO / "scripts/run_babyai.sh")],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert done.returncode == 2 and "holds no finished checkpoint; run: bash scripts/prepare_model.sh" in done.stderr


def test_geo3k_starts_with_a_model_that_fits_and_takes_slimes_own(command: Command) -> None:
    small = by_flag(train_flags(command("run_geo3k_vlm.sh")))
    assert small["--hf-checkpoint"][0].endswith("Qwen3.5-4B")
    assert small["--spec"] == ["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"]
    assert (small["--expert-model-parallel-size"], small["--rollout-num-gpus-per-engine"]) == (["1"], ["1"])
    assert small["--save-retain-interval"] == ["20"]
    mixture = by_flag(train_flags(command("run_geo3k_vlm.sh", "--model", "Qwen3.5-35B-A3B")))
    assert (mixture["--expert-model-parallel-size"], mixture["--rollout-num-gpus-per-engine"]) == (["8"], ["8"])
    everything = by_flag(train_flags(command("run_geo3k_vlm.sh", CHECKPOINTS_KEPT="all", ENGINE_GPUS="2")))
    assert "--save-retain-interval" not in everything and everything["--rollout-num-gpus-per-engine"] == ["2"]


@pytest.mark.parametrize("model", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct", "Qwen3-4B", "Qwen3.5-122B-A10B"])
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--flat",)], ids=" ".join)
@pytest.mark.parametrize("script", ["run_geo3k_vlm.sh", "run_crafter_vlm.sh"])
def test_a_model_that_slime_does_not_describe_with_pictures_is_refused(
    fresh: Fresh, script: str, options: tuple[str, ...], model: str
) -> None:
    done = fresh.run(script, "--model", model, *options)
    assert done.returncode == 2 and not done.stdout
    assert model in done.stderr and "name a model that slime trains with pictures: Qwen3.5-0.8B" in done.stderr


def test_a_later_slime_may_describe_more_models_with_pictures(fresh: Fresh) -> None:
    (fresh.slime / "scripts/models/qwen3-vl-8B-Instruct-vl.sh").write_text("MODEL_ARGS=(--spec a b --num-layers 9)")
    done = fresh.run("run_geo3k_vlm.sh", "--dry-run", "--model", "Qwen3-vl-8B-Instruct")
    assert by_flag(train_flags(fresh.words(done)))["--spec"] == ["a", "b"]


def test_crafter_with_pictures_is_ppo_from_a_conversion_that_sees(fresh: Fresh) -> None:
    flags = by_flag(train_flags(fresh.job("run_crafter_vlm.sh")))
    assert flags["--spec"] == ["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"]
    assert flags["--advantage-estimator"] == ["ppo"]
    assert flags["--rollout-function-path"] == ["rollout.fixed_turn.generate_rollout"]
    config = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())
    assert config["env"]["vlm"] is True and config["history"] == "window"
    assert config["chat_template_kwargs"] == {"enable_thinking": False}
    prepared = fresh.run("prepare_model.sh", "Qwen3.5-4B", "--images", "--dry-run").stdout
    assert f"--save {flags['--ref-load'][0]}" in prepared and "get_qwen3_5_vl_model_provider" in prepared
    as_text = fresh.run("prepare_model.sh", "Qwen3.5-4B", "--dry-run").stdout
    assert "get_qwen3_5_vl_model_provider" not in as_text and flags["--ref-load"][0] not in as_text


@pytest.mark.parametrize("size", ["0.8B", "4B", "9B", "27B", "35B-A3B"])
def test_this_slime_has_what_it_takes_to_train_with_pictures(fresh: Fresh, size: str) -> None:
    """The files of the checkout that SLIME_PATH names, and the model provider that the script puts into them."""
    path = os.environ.get("SLIME_PATH")
    if not path:
        pytest.skip("set SLIME_PATH to a slime checkout")
    flags = by_flag(train_flags(fresh.job("run_crafter_vlm.sh", "--model", f"Qwen3.5-{size}", SLIME_PATH=path)))
    module, provider = flags["--spec"]
    assert f"def {provider}(" in (Path(path) / f"{module.replace('.', '/')}.py").read_text()
    assert int(flags["--num-layers"][0]) > 0


@pytest.mark.parametrize("script", ["run_geo3k_vlm.sh", "run_sft.sh", "run_crafter_vlm.sh", "run_babyai.sh"])
def test_help_names_the_models_and_the_variables_of_its_own_script(fresh: Fresh, script: str) -> None:
    shown = fresh.run(script, "--help").stdout
    assert ("Qwen3.5-35B-A3B: those that slime trains with pictures" in shown) == ("vlm" in script)
    assert ("Qwen2.5-3B-Instruct, Qwen2.5-7B-Instruct" in shown) == ("vlm" not in script)
    own = {"run_geo3k_vlm.sh": "PROBLEMS=64", "run_sft.sh": "EPOCHS=3"}.get(script, "TURNS=")
    assert own in shown and ("PRETRAINED_CRITIC=" in shown) == (own == "TURNS=")


def export(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`export_model.sh --dry-run`, called with the run's folder relative to where the user stands."""
    run, model = tmp_path / "run" / "actor", tmp_path / "models" / "Qwen2.5-3B-Instruct"
    for step in (19, 39):
        (run / f"iter_{step:07d}").mkdir(parents=True, exist_ok=True)
    (run / "latest_checkpointed_iteration.txt").write_text("39")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 151936}}))
    return subprocess.run(
        ["bash", str(REPO / "scripts/export_model.sh"), "run", "Qwen2.5-3B-Instruct", "--dry-run", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "MODELS": str(tmp_path / "models")},
    )


def test_a_run_is_exported_at_its_last_step_or_at_a_given_one(tmp_path: Path) -> None:
    last, given = export(tmp_path), export(tmp_path, "19")
    assert f"--input-dir {tmp_path}/run/actor/iter_0000039 --output-dir {tmp_path}/run/hf/39" in last.stdout
    assert f"--origin-hf-dir {tmp_path}/models/Qwen2.5-3B-Instruct --vocab-size 151936" in last.stdout
    assert f"--input-dir {tmp_path}/run/actor/iter_0000019 --output-dir {tmp_path}/run/hf/19" in given.stdout


@pytest.mark.parametrize(("step", "words"), [("29", "iter_0000029"), ("last", "STEP must be the number of a step")])
def test_a_step_that_was_not_saved_is_refused(tmp_path: Path, step: str, words: str) -> None:
    done = export(tmp_path, step)
    assert done.returncode == 2 and words in done.stderr
