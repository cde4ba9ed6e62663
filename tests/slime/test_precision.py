"""In float32, training and rollout must agree to rounding: what bf16 blurs would show here."""

from collections.abc import Callable

import pytest
import torch

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run
from tests.slime.expectation import trained_samples

pytestmark = pytest.mark.slow


def test_training_and_rollout_agree_on_log_probs_in_float32(
    make_run: Callable[..., Run], engine: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_CPU_FP32", "1")
    run = make_run("float32", *engine_flags(engine), "--num-rollout", "2", history="full")
    run.train()
    rows = [
        item.row
        for rollout in (0, 1)
        for item in trained_samples(run.records("actor", rollout), run.samples(rollout))
        if not item.is_bootstrap
    ]
    differences = torch.cat([row["log_probs"] - row["rollout_log_probs"] for row in rows]).abs()
    print(f"float32 log-prob difference: mean {differences.mean():.2e}, max {differences.max():.2e}")
    assert differences.max() < 1e-4
