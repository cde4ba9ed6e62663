"""The GPU checks themselves, tried where there is no GPU: they run, they hold, and a wrong result
does not pass."""

import os
import subprocess
from itertools import islice

import pytest
import torch

from tests.fixtures.warm_python import run_python
from tests.gpu import check

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return run_python(["-m", "tests.gpu.check", *flags], env=environment)


@pytest.mark.slow
def test_all_checks_run_and_hold_without_a_gpu_when_asked_to() -> None:
    done = run("--device", "cpu", "--turns", "32", "--longest", "40")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "no GPU was checked" in lines[0] and lines[-1] == "all checks hold"
    assert sum(line.startswith("ok") for line in lines) == 5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU, which would be checked"
)
def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    done = run()
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr


def test_a_wrong_advantage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from advantage import gae

    monkeypatch.setattr(gae, "solve_runs", lambda deltas, decay, longest: deltas)
    findings = check.check_hook(torch.device("cpu"), turns=16, longest=20)
    assert [finding.holds for finding in islice(findings, 2)] == [False, False]
