"""What tests of the training scripts share: a fresh shell beside a slime checkout, and the recorded flags."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class Fresh:
    """A fresh shell in a folder that stands for slime's image: HOME, PATH, and where the image's folders are here."""

    home: Path
    slime: Path

    @property
    def output(self) -> Path:
        return self.home / "out"

    @property
    def variables(self) -> dict[str, str]:
        """All that the shell has; programs in `home`/bin come first."""
        folders = {"SLIME_PATH": str(self.slime), "OUTPUT": str(self.output), "MODELS": str(self.home / "models")}
        return {"HOME": str(self.home), "PATH": f"{self.home}/bin:{os.environ['PATH']}", **folders}

    def install(self, program: str, text: str) -> None:
        """Put a shell script into `home`/bin."""
        path = self.home / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start one of the scripts, with what the user exported."""
        words = ["bash", str(REPO / "scripts" / script), *options]
        variables = {**self.variables, **environment}
        return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=300)

    def words(self, done: subprocess.CompletedProcess[str]) -> list[str]:
        """The words that Ray would be given by the script that a dry run printed."""
        assert done.returncode == 0, done.stderr
        printed = self.home / "printed.sh"
        printed.write_text(done.stdout)
        bash = ["bash", "-euc", SHOW_WORDS, "-", str(printed)]
        shown = subprocess.run(bash, capture_output=True, text=True, env=self.variables)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout.split("\0")[:-1]

    def job(self, script: str, *options: str, **environment: str) -> list[str]:
        """The words that Ray would be given by the script."""
        return self.words(self.run(script, "--dry-run", *options, **environment))


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    """A fresh shell beside a folder that has slime's model files and no slime."""
    models = tmp_path / "slime" / "scripts" / "models"
    models.mkdir(parents=True)
    for name in MODELS:
        (models / f"{name}.sh").write_text(SPEC if "3.5" in name else QWEN_3B)
    return Fresh(tmp_path, tmp_path / "slime")


@pytest.fixture
def command(fresh: Fresh) -> Command:
    """`Fresh.job`, for tests that need nothing else."""
    return fresh.job


def recorded_flags() -> dict[str, str]:
    """Every flag of train.py, and how many values it takes: 0, 1 or +."""
    return {words[0]: words[1] for words in map(str.split, FLAGS.read_text().splitlines())}


def recorded_own_flags() -> set[str]:
    """The flags of slime's own parser."""
    return {line.split()[0] for line in FLAGS.read_text().splitlines() if line.endswith(" slime")}


def job_environment(words: list[str]) -> dict[str, str]:
    """The variables that Ray is told to give every process of the job."""
    given = next(word for word in words if word.startswith("--runtime-env-json="))
    return json.loads(given.partition("=")[2])["env_vars"]


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
