"""slime's train.py with a real SGLang behind slime's own router: turns, log-probs, versions and
targets."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from tests.slime.conftest import learning_roles
from tests.slime.cpu.harness import Run
from tests.slime.expectation import assert_trained_as_paid, log_prob_gaps

pytestmark = pytest.mark.slow

LAUNCHER = Path(__file__).parent / "cpu" / "run_sglang.py"
SERVER_FLAGS = """
--device cpu --attention-backend torch_native --dtype float32 --grammar-backend none
--max-total-tokens 16384 --max-running-requests 16 --sleep-on-idle --skip-server-warmup
"""


@pytest.fixture(scope="module")
def sglang(model: Path, ground: Path) -> Iterator[int]:
    """The port of a real SGLang server over the tiny model."""
    folder = os.environ.get("SLIME_VERLOG_SGLANG")
    if not folder:
        pytest.skip(
            "set SLIME_VERLOG_SGLANG to the virtual environment that "
            "tests/slime/cpu/install_sglang.sh makes, to run against a real SGLang"
        )
    port = unused_port()
    command = [
        f"{folder}/bin/python",
        str(LAUNCHER),
        *f"--model-path {model} --host 127.0.0.1 --port {port} {SERVER_FLAGS}".split(),
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


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
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
        f"--rollout-external-engine-addrs 127.0.0.1:{sglang} --num-rollout 3",
        "--num-critic-only-steps 1 --normalize-advantages --eval-interval 3",
        "--eval-prompt-data held-out unused",
        *learning_roles(work),
    )
    experiment.train()
    return experiment


@pytest.mark.parametrize("rollout", [1, 2])
def test_what_megatron_trained_on_is_what_sglangs_answers_were_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    for role in ("actor", "critic"):
        assert_trained_as_paid(run, role, rollout, tokenizer, whitens=True)


def test_sglang_and_megatron_agree_on_log_probs_after_an_update(run: Run) -> None:
    assert log_prob_gaps(run, 1, 2).mean() < 2e-3


def test_weights_were_updated_and_prefixes_cached(run: Run) -> None:
    versions = run.versions(range(3))
    assert [len(found) for found in versions] == [1, 1, 1]
    assert versions[1] != versions[2]
    assert sum(turn["prefix_cache_info"]["cached_tokens"] for turn in run.turns(2)) > 0


def test_slimes_router_and_sglang_tell_what_the_engine_runs(run: Run) -> None:
    found = run.logged("rollout/engine/0/running")
    assert found and all(0 <= running <= 16 for running in found)
