"""Models: their shapes as slime describes them, and downloads that resume where they were
interrupted."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slime_verlog import ConfigError

VISION_MIXTURE = "Qwen3.5-35B-A3B"
VISION_MODELS = ("Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", VISION_MIXTURE)
"""The models that slime main and v0.3.1 train with pictures. They describe the mixture in a file of
its own."""
VISION_PROVIDER = (
    "MODEL_ARGS[1]=slime_plugins.models.qwen3_5_vl MODEL_ARGS[2]=get_qwen3_5_vl_model_provider"
)
"""Puts slime's model provider for pictures in place of the text model's layers, as the mixture's
file does."""


@dataclass(frozen=True)
class Shape:
    """Where slime describes a model for Megatron: a shell script that sets MODEL_ARGS."""

    file: str
    """Its path in slime's checkout."""
    change: str = ""
    """A shell command that adapts MODEL_ARGS."""

    @property
    def lines(self) -> list[str]:
        """Shell commands that set MODEL_ARGS; they read SLIME_PATH."""
        source = f'source "$SLIME_PATH/{self.file}"'
        if not self.change:
            return [source]
        return [f"{source}  # the text model; the next line adds slime's pictures", self.change]


def find_shape(model: str, slime: str, images: bool) -> Shape:
    """Return where the slime checkout describes a model; raises ConfigError if it cannot train it
    with pictures."""
    name = model.replace("Qwen", "qwen", 1) if model.startswith("Qwen") else model
    file = f"scripts/models/{name}.sh"
    seeing = f"scripts/models/{name}-vl.sh"
    if not images:
        short = f"scripts/models/{name.removesuffix('-Instruct')}.sh"
        return Shape(file if Path(slime, file).is_file() else short)
    if model == VISION_MIXTURE or Path(slime, seeing).is_file():
        return Shape(seeing)
    if model in VISION_MODELS:
        return Shape(file, VISION_PROVIDER)
    raise ConfigError(
        f"slime has no description of {model} with pictures; name a model that slime trains with "
        f"pictures: {' '.join(VISION_MODELS)}"
    )


def read_shape(shape: Shape, slime: str, dry_run: bool) -> list[str]:
    """Return MODEL_ARGS; a dry run does without, and says so, where the slime checkout has no such
    file.

    Raises ConfigError if the file is missing or fails.
    """
    path = Path(slime, shape.file)
    if not path.is_file():
        if not dry_run:
            raise ConfigError(
                f"no {path}; set SLIME_PATH to a slime checkout, or add the model there "
                "(docs/slime_cluster.md)"
            )
        print(f"note: there is no {path}, so the model's flags are missing below", file=sys.stderr)
        return []
    program = "\n".join(["{", *shape.lines, "} >&2", "printf '%s\\0' \"${MODEL_ARGS[@]}\""])
    environment = {**os.environ, "SLIME_PATH": slime}
    done = subprocess.run(
        ["bash", "-euc", program], env=environment, capture_output=True, text=True
    )
    arguments = done.stdout.split("\0")[:-1]
    if done.returncode:
        raise ConfigError(f"{path} cannot be read by bash: {done.stderr.strip()}")
    if shape.change and arguments[0] != "--spec":
        raise ConfigError(f"{path} does not begin with --spec; name another model")
    return arguments


def reference_name(model: str, images: bool) -> str:
    """Return the folder in MODELS with the model converted for Megatron."""
    return f"{model}{'_images' if images else ''}_torch_dist"


def run(command: list[str], dry_run: bool = False, pythonpath: str = "") -> None:
    """Print a command and run it, unless this is a dry run; raises SystemExit with its status if it
    fails."""
    variables = {"PYTHONPATH": pythonpath} if pythonpath else {}
    prefix = ["env", f"PYTHONPATH={pythonpath}"] if pythonpath else []
    print(shlex.join([*prefix, *command]), flush=True)
    if dry_run:
        return
    done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(done.returncode)


def download(name: str, folder: Path, *options: str, dry_run: bool = False) -> None:
    """Download from the Hugging Face hub, or continue; raises SystemExit if that fails."""
    run(["hf", "download", *options, name, "--local-dir", str(folder)], dry_run)


def was_interrupted(folder: Path) -> bool:
    """Whether a download into this folder was interrupted: hf keeps what it has of a file beside
    the folder's files."""
    return any((folder / ".cache").rglob("*.incomplete"))


def is_complete(folder: Path) -> bool:
    """Whether a Hugging Face folder has its configuration, its tokenizer and every file of
    weights."""
    needed = ["config.json", "tokenizer_config.json"]
    if not (folder / "model.safetensors").is_file():
        index = folder / "model.safetensors.index.json"
        if not index.is_file():
            return False
        needed += json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / name).is_file() for name in needed) and not was_interrupted(folder)


def download_model(model: str, folder: Path, dry_run: bool = False) -> None:
    """Download a model from the Hugging Face hub, unless it is complete; raises SystemExit if that
    fails."""
    if not is_complete(folder):
        owner = os.environ.get("HUB_OWNER") or "Qwen"
        download(f"{owner}/{model}", folder, dry_run=dry_run)
