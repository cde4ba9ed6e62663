"""A slime checkout on CPU for a session of tests: a tiny model, its Megatron checkpoint, and
engines over it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from tests.slime.cpu.harness import Run, Slime, convert_checkpoint, find_slime, make_model

LEDGER_ENV = "tests.slime.cpu.ledger_env"


@pytest.fixture(scope="session")
def slime() -> Slime:
    return find_slime()


@pytest.fixture(scope="session")
def ground(slime: Slime) -> Iterator[Path]:
    """The folder of the session's runs."""
    torch.set_num_threads(1)
    with short_folder() as folder:
        yield folder


@contextmanager
def short_folder() -> Iterator[Path]:
    """A short path, because Ray's sockets lie below it and socket paths are short; SLIME_CPU_KEEP=1
    leaves it there."""
    folder = Path(tempfile.mkdtemp(prefix="sv-", dir="/tmp"))
    try:
        yield folder
    finally:
        if not os.environ.get("SLIME_CPU_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def model(ground: Path) -> Path:
    return make_model(ground / "model")


@pytest.fixture(scope="session")
def reference(slime: Slime, ground: Path, model: Path) -> Path:
    """The model as a Megatron checkpoint."""
    return convert_checkpoint(slime, ground / "conversion", model)


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineServer]:
    with EngineServer(EngineOptions(model_path=str(model), max_running_requests=8)) as server:
        yield server


@pytest.fixture(scope="module")
def make_run(slime: Slime, ground: Path, model: Path, reference: Path) -> Callable[..., Run]:
    """Makes one experiment on the ledger game; see `Run`. `config` updates the YAML, `flags` the
    command line."""

    def make(name: str, *flags: str, gpus: int = 1, script: str = "train.py", **config: Any) -> Run:
        work = ground / name
        settings = {**ledger_settings(work), **config}
        return Run(slime, work, model, reference, settings, [*BATCH_FLAGS, *flags], gpus, script)

    return make


def ledger_settings(work: Path) -> dict[str, Any]:
    """The YAML of a run on the ledger game, whose ledger lies in the run's folder."""
    return {
        "rollout_interaction_env_path": LEDGER_ENV,
        "env": {"ledger": str(work / "ledger"), "longest": 9},
        "tasks": ["count"],
        "eval": {"episodes": 6},
        "n_env": 4,
        "env_workers": 1,
    }


BATCH_FLAGS = (
    "--rollout-batch-size 16 --n-samples-per-prompt 1 --global-batch-size 8",
    "--rollout-seed 3",
    "--rollout-max-response-len 8 --rollout-max-context-len 256 --rollout-temperature 1.0",
)


def engine_flags(engine: EngineServer) -> list[str]:
    """An engine that runs already; slime puts its own router in front of it."""
    return [f"--rollout-external-engine-addrs 127.0.0.1:{engine.port}"]


def learning_roles(work: Path) -> list[str]:
    """Both roles take quick steps, and the critic saves into its own folder."""
    return roles(work / "roles.yaml", {"lr": 5e-3, "save": str(work / "critic")}, {"lr": 1e-3})


def roles(path: Path, critic: dict[str, Any], actor: dict[str, Any]) -> list[str]:
    """`--megatron-config-path` with overrides for each role."""
    entries = [
        {"name": "default", "role": "critic", "overrides": critic},
        {"name": "default", "role": "actor", "overrides": actor},
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"megatron": entries}))
    return [f"--megatron-config-path {path}"]
