"""Converts models from and to Megatron's checkpoints.

python3 -m scripts.launcher.convert prepare_model.sh NAME [--images] [--dry-run]
python3 -m scripts.launcher.convert export_model.sh RUN MODEL [STEP] [--dry-run]
"""

import json
import os
import sys
from pathlib import Path

from scripts.launcher.models import download_model, find_shape, read_shape, reference_name, run
from scripts.launcher.own_python import header
from scripts.launcher.resume import TRACKER, last_step, step_name
from scripts.launcher.run import exit_with
from scripts.launcher.variables import Paths, read_variables
from slime_verlog import ConfigError


def prepare(model: str, words: list[str], paths: Paths) -> None:
    """Download a model and convert it for Megatron; raises ConfigError for unknown words."""
    for word in words:
        if word not in ("--images", "--dry-run"):
            raise ConfigError(f"unknown option {word}; give --images or --dry-run")
    dry = "--dry-run" in words
    images = "--images" in words
    slime = paths.slime_path
    folder = Path(paths.models, model)
    reference = Path(paths.models, reference_name(model, images))
    arguments = read_shape(find_shape(model, slime, images), slime, dry)
    download_model(model, folder, dry)
    if not (reference / TRACKER).is_file():
        tool = f"{slime}/tools/convert_hf_to_torch_dist.py"
        target = ["--hf-checkpoint", str(folder), "--save", str(reference)]
        run(["python3", tool, *arguments, *target], dry, f"{slime}:{paths.megatron_path}")
    if not dry:
        print(f"ready: {folder} and {reference}")


def export(run_dir: Path, model: str, words: list[str], paths: Paths) -> None:
    """Turn a checkpoint of a run into a Hugging Face folder; raises ConfigError if it was not
    saved."""
    step = last_step(run_dir / "actor")
    for word in words:
        if word.isdecimal():
            step = int(word)
        elif word != "--dry-run":
            raise ConfigError(f"STEP must be the number of a step, got {word!r}")
    origin = Path(model) if Path(model).is_dir() else Path(paths.models, model)
    if not (origin / "config.json").is_file():
        raise ConfigError(f"{origin} holds no Hugging Face model")
    checkpoint = run_dir / "actor" / step_name(step)
    if not checkpoint.is_dir():
        raise ConfigError(f"no {checkpoint}; the run has saved no actor yet, or not at that step")
    # Megatron pads the vocabulary to a multiple of the GPUs that share it; the folder has the
    # model's own size.
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    vocabulary = (config.get("text_config") or config)["vocab_size"]
    tool = [
        "python3",
        f"{paths.slime_path}/tools/convert_torch_dist_to_hf.py",
        "--input-dir",
        str(checkpoint),
    ]
    tool += [
        "--output-dir",
        f"{run_dir}/hf/{step}",
        "--origin-hf-dir",
        str(origin),
        "--vocab-size",
        str(vocabulary),
    ]
    inherited = os.environ.get("PYTHONPATH", "")
    pythonpath = ":".join(filter(None, [paths.slime_path, paths.megatron_path, inherited]))
    run(tool, "--dry-run" in words, pythonpath)
    print(f"ready: {run_dir}/hf/{step}")


def convert(script: str, words: list[str]) -> int:
    """Do what one of the two scripts was asked for; returns 2 if its arguments are missing."""
    needed = 1 if script == "prepare_model.sh" else 2
    wants_help = bool({"--help", "-h"} & set(words))
    if wants_help or len(words) < needed:
        print(header(script), file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    paths = read_variables(Paths, {}, os.environ)
    if script == "prepare_model.sh":
        prepare(words[0], words[1:], paths)
    else:
        export(Path(words[0]), words[1], words[2:], paths)
    return 0


if __name__ == "__main__":
    exit_with(convert, Path(sys.argv[1]).name, sys.argv[2:])
