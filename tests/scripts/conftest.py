"""What tests of the training scripts share: a folder that looks like a slime checkout, and the recorded flags."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FLAGS = Path(__file__).with_name("slime_flags.txt")

QWEN_3B = """\
MODEL_ARGS=(--swiglu --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16
  --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-6
  --rotary-base 1000000 --group-query-attention --num-query-groups 2 --vocab-size 151936)
"""

SPEC = "MODEL_ARGS=(--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --num-layers 32)"
MODELS = ("qwen2.5-3B", "qwen2.5-7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen3.5-4B", "qwen3.5-35B-A3B-vl")

Command = Callable[..., list[str]]

SHOW_WORDS = 'ray() { printf "%s\\0" ray "$@"; }; source "$1"'
"""What the printed script would run, without running it."""


def recorded_flags() -> dict[str, str]:
    """Every flag of train.py, and how many values it takes: 0, 1 or +."""
    return dict(line.split() for line in FLAGS.read_text().splitlines())


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs a script with --dry-run, then what it printed; returns the words that Ray would be given."""

    def run(script: str, *options: str, slime: Path | None = None, **environment: str) -> list[str]:
        folder = slime or tmp_path / "slime"
        if slime is None:
            (folder / "scripts" / "models").mkdir(parents=True, exist_ok=True)
            for name in MODELS:
                (folder / "scripts" / "models" / f"{name}.sh").write_text(SPEC if "3.5" in name else QWEN_3B)
        variables = {"SLIME_PATH": str(folder), "OUTPUT": str(tmp_path / "out"), "MODELS": str(tmp_path / "models")}
        done = subprocess.run(
            ["bash", str(REPO / "scripts" / script), "--dry-run", *options],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], **variables, **environment},
        )
        assert done.returncode == 0, done.stderr
        printed = tmp_path / "printed.sh"
        printed.write_text(done.stdout)
        shown = subprocess.run(["bash", "-euc", SHOW_WORDS, "-", str(printed)], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout.split("\0")[:-1]

    return run


def train_flags(words: list[str]) -> list[str]:
    """What of the command train.py itself sees."""
    return words[next(i for i, word in enumerate(words) if word.endswith("train.py")) + 1 :]


def by_flag(words: list[str]) -> dict[str, list[str]]:
    """Values by flag; the last one of a repeated flag wins."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found
