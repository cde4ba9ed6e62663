"""What tests of the training scripts share: a machine with a slime checkout, and the recorded
flags."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.launch import Ppo
from scripts.launcher.geo3k import Geo3k
from scripts.launcher.job import Job
from scripts.launcher.run import Run, read_run
from scripts.launcher.sao import Sao
from scripts.launcher.sft import Sft

REPO = Path(__file__).parents[2]
PYTHON = Path(sys.executable).parent
FLAGS = Path(__file__).with_name("slime_flags.txt")

QWEN_3B = """\
MODEL_ARGS=(--swiglu --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16
  --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-6
  --rotary-base 1000000 --group-query-attention --num-query-groups 2 --vocab-size 151936)
"""

SPEC = "MODEL_ARGS=(--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --num-layers 32)"
MODELS = (
    "qwen2.5-3B",
    "qwen2.5-7B",
    "qwen3-4B",
    "qwen3-8B",
    "qwen3-30B-A3B",
    "qwen3.5-4B",
    "qwen3.5-35B-A3B-vl",
)

KINDS: dict[str, type[Run[Any]]] = {
    "launch": Ppo,
    "launcher.sao": Sao,
    "launcher.sft": Sft,
    "launcher.geo3k": Geo3k,
}
EXEC = re.compile(r'exec python3 -m scripts\.([\w.]+) "\$0" "\$\{SETTINGS\[@\]\}" -- (.*)"\$@"')
PRETRAINING = "run_value_pretraining.sh"
SCRIPTS = sorted(
    path.name for path in (REPO / "scripts").glob("run_*.sh") if EXEC.search(path.read_text())
)
SCRIPTS.append(PRETRAINING)
"""The scripts that start runs."""

SHOW_WORDS = 'ray() { printf "%s\\0" ray "$@"; }; source "$1"'
"""What the printed script would run, without running it."""


def read_page(text: str) -> tuple[type[Run[Any]], dict[str, str], list[str]]:
    """What a script gives to the launcher: the kind of run, its variables, and its own options."""
    settings = text.partition("SETTINGS=(")[2].partition("\n)\n")[0]
    called = EXEC.search(text)
    assert called
    return KINDS[called[1]], dict(re.findall(r"([A-Z_]+)=(\S+)", settings)), called[2].split()


@dataclass
class Machine:
    """A folder that stands for slime's image: HOME, PATH, and where the image's folders are
    here."""

    home: Path
    slime: Path

    @property
    def output(self) -> Path:
        return self.home / "out"

    @property
    def variables(self) -> dict[str, str]:
        """All that a shell has; programs in `home`/bin come first."""
        folders = {
            "SLIME_PATH": str(self.slime),
            "OUTPUT": str(self.output),
            "MODELS": str(self.home / "models"),
        }
        return {
            "HOME": str(self.home),
            "PATH": f"{self.home}/bin:{PYTHON}:{os.environ['PATH']}",
            **folders,
        }

    def install(self, program: str, text: str) -> None:
        """Put a shell script into `home`/bin."""
        path = self.home / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(
        self, script: str, *options: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Start one of the scripts in a shell, with what the user exported."""
        words = ["bash", str(REPO / "scripts" / script), *options]
        variables = {**self.variables, **environment}
        return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=300)

    @contextmanager
    def exported(self, **environment: str) -> Iterator[None]:
        """This process with the machine's variables and no others."""
        variables = {**self.variables, **environment}
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            yield

    def build(self, script: str, *options: str, **environment: str) -> Job:
        """The job that a script would submit, without a shell."""
        page = script
        if script == PRETRAINING:
            page = f"run_{environment.get('RUN', 'babyai')}.sh"
            environment = {**environment, "PRETRAINING": script}
        kind, settings, own = read_page((REPO / "scripts" / page).read_text())
        with self.exported(**environment):
            return read_run(kind, script, settings, ["--dry-run", *own, *options]).build()

    def job(self, script: str, *options: str, **environment: str) -> list[str]:
        """The words that Ray would be given by the script."""
        return self.build(script, *options, **environment).submission()

    def flags(self, script: str, *options: str, **environment: str) -> dict[str, list[str]]:
        """The flags that train.py would be given by the script."""
        return by_flag(self.build(script, *options, **environment).words)

    def words(self, printed: str) -> list[str]:
        """The words that Ray would be given by a script that was printed."""
        file = self.home / "printed.sh"
        file.write_text(printed)
        bash = ["bash", "-euc", SHOW_WORDS, "-", str(file)]
        shown = subprocess.run(bash, capture_output=True, text=True, env=self.variables)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout.split("\0")[:-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with slime's model files and no slime."""
    models = tmp_path / "slime" / "scripts" / "models"
    models.mkdir(parents=True)
    for name in MODELS:
        (models / f"{name}.sh").write_text(SPEC if "3.5" in name else QWEN_3B)
    return Machine(tmp_path, tmp_path / "slime")


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
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found
