"""Rollout without training, then training without rollout, on what the first saved: slime's two
debug modes."""

from collections.abc import Callable
from typing import Any

import pytest

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, learning_roles
from tests.slime.cpu.harness import Run, Slime
from tests.slime.expectation import assert_trained_as_paid

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], slime: Slime, engine: EngineServer, ground: Any) -> Run:
    outside = engine_flags(engine)
    if "return 0, 0" in (slime.path / "slime" / "ray" / "placement_group.py").read_text():
        pytest.skip(
            "slime v0.3.1 reserves no place for the actors of a rollout-only run with outside "
            "engines"
        )
    work = ground / "debug"
    experiment = make_run(
        "debug",
        "--num-rollout 2 --num-critic-only-steps 1 --normalize-advantages",
        *learning_roles(work),
        gpus=2,
    )
    # Through a folder slime would reload weights that nobody wrote: no rank trains here.
    experiment.train(["--debug-rollout-only --update-weight-transport nccl", *outside])
    assert not experiment.records("critic", 0)
    experiment.train(
        [f"--debug-train-only --load-debug-rollout-data {work}/samples/{{rollout_id}}.pt"]
    )
    return experiment


@pytest.mark.parametrize("rollout", [0, 1])
def test_saved_samples_are_trained_on_as_fresh_ones_would_be(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    for role in ("critic", "actor")[: 1 + rollout]:
        assert_trained_as_paid(run, role, rollout, tokenizer, whitens=True)
