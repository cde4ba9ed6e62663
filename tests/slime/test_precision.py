"""In float32, training and rollout must agree to rounding: what bf16 blurs would show here."""

from collections.abc import Callable

import pytest

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run
from tests.slime.expectation import log_prob_gaps

pytestmark = pytest.mark.slow


def test_training_and_rollout_agree_on_log_probs_in_float32(
    make_run: Callable[..., Run], engine: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_CPU_FP32", "1")
    run = make_run("float32", *engine_flags(engine), "--num-rollout 2", history="full")
    run.train()
    assert log_prob_gaps(run, 0, 1).max() < 1e-4
