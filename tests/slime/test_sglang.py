"""slime's train.py with a real SGLang behind slime's own router: turns, log-probs, versions and targets."""

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slime.conftest import roles
from tests.slime.cpu.harness import Run, free_port
from tests.slime.expectation import (
    critic_targets,
    expected_advantages,
    largest_difference,
    payments_of,
    trained_samples,
    whitened,
)

pytestmark = pytest.mark.slow

LAUNCHER = Path(__file__).parent / "cpu" / "run_sglang.py"


@pytest.fixture(scope="module")
def sglang(model: Path, ground: Path) -> Iterator[int]:
    """The port of a real SGLang server over the tiny model."""
    folder = os.environ.get("SLIME_VERLOG_SGLANG")
    if not folder:
        pytest.skip(
            "set SLIME_VERLOG_SGLANG to the virtual environment that tests/slime/cpu/install_sglang.sh makes, to run "
            "against a real SGLang"
        )
    port = free_port()
    command = [
        *(f"{folder}/bin/python", str(LAUNCHER), "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none"),
        *("--max-total-tokens", "16384", "--max-running-requests", "16", "--sleep-on-idle", "--skip-server-warmup"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(ground / "sglang.log", "wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(server, port, ground / "sglang.log")
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            assert server.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(1)


@pytest.fixture(scope="module")
def run(sglang: int, make_run: Callable[..., Run], ground: Path) -> Run:
    work = ground / "sglang"
    experiment = make_run(
        "sglang",
        *("--rollout-external-engine-addrs", f"127.0.0.1:{sglang}", "--num-rollout", "3"),
        *("--num-critic-only-steps", "1", "--normalize-advantages", "--eval-interval", "3"),
        *("--eval-prompt-data", "held-out", "unused"),
        *roles(work / "roles.yaml", {"lr": 5e-3, "save": str(work / "critic")}, {"lr": 1e-3}),
    )
    experiment.train()
    return experiment


@pytest.mark.parametrize("rollout", [1, 2])
def test_what_megatron_trained_on_is_what_sglangs_answers_were_paid(run: Run, rollout: int, tokenizer: Any) -> None:
    for role in ("actor", "critic"):
        items = trained_samples(run.records(role, rollout), run.samples(rollout))
        paid = payments_of(items, run.payments(), tokenizer)
        expected = expected_advantages(items, paid)
        assert largest_difference(items, "advantages", whitened(expected)) < 2e-5
        assert largest_difference(items, "returns", critic_targets(items, expected)) < 2e-5


def test_sglang_and_megatron_agree_on_log_probs_after_an_update(run: Run) -> None:
    rows = [
        item.row
        for rollout in (1, 2)
        for item in trained_samples(run.records("actor", rollout), run.samples(rollout))
        if not item.is_bootstrap
    ]
    differences = torch.cat([row["log_probs"] - row["rollout_log_probs"] for row in rows]).abs()
    print(f"SGLang/Megatron log-prob difference: mean {differences.mean():.2e}, max {differences.max():.2e}")
    assert differences.mean() < 2e-3


def test_weights_were_updated_and_prefixes_cached(run: Run) -> None:
    versions = [{v for s in run.samples(r) for v in s["weight_versions"]} for r in range(3)]
    assert [len(found) for found in versions] == [1, 1, 1]
    assert versions[1] != versions[2]
    cached = [s["prefix_cache_info"]["cached_tokens"] for s in run.samples(2) if s["metadata"]["kind"] == "turn"]
    assert sum(cached) > 0


def test_turns_add_up(run: Run) -> None:
    for rollout in range(3):
        assert sum(s["metadata"]["kind"] == "turn" for s in run.samples(rollout)) == 16
    assert len(run.samples("eval_0")) == 6


def test_slimes_router_and_sglang_tell_what_the_engine_runs(run: Run) -> None:
    found = re.findall(r"'rollout/engine/0/running': ([\d.]+)", run.log.read_text(errors="replace"))
    assert found and all(0 <= float(running) <= 16 for running in found)
