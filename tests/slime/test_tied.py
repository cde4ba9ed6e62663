"""A model whose output layer is its embedding (Qwen2.5-3B, which run_babyai.sh trains), as actor
and as critic."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from tests.slime.conftest import BATCH_FLAGS, engine_flags, ledger_settings, roles
from tests.slime.cpu.harness import Run, Slime, convert_checkpoint, make_model
from tests.slime.expectation import assert_trained_as_paid, log_prob_gaps
from tests.slime.test_train_loop import trained

pytestmark = pytest.mark.slow

ROLLOUTS = 3


@pytest.fixture(scope="module")
def tied(ground: Path) -> Path:
    return make_model(ground / "tied_model", tied=True)


@pytest.fixture(scope="module")
def tied_engine(tied: Path) -> Iterator[EngineServer]:
    with EngineServer(EngineOptions(model_path=str(tied), max_running_requests=8)) as server:
        yield server


@pytest.fixture(scope="module")
def run(slime: Slime, ground: Path, tied: Path, tied_engine: EngineServer) -> Run:
    """Rollout 0 trains the critic alone. Both roles start from the tied checkpoint, whose critic
    has no head yet."""
    work = ground / "tied"
    reference = convert_checkpoint(slime, work / "conversion", tied)
    counts = f"--num-rollout {ROLLOUTS} --num-critic-only-steps 1 --normalize-advantages"
    critic = roles(work / "roles.yaml", {"lr": 5e-3, "save": str(work / "critic")}, {})
    flags = [*BATCH_FLAGS, *engine_flags(tied_engine), counts, *critic]
    experiment = Run(slime, work, tied, reference, ledger_settings(work), flags, 2)
    experiment.train()
    return experiment


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_advantages_and_value_targets_are_those_of_what_was_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    for role in ("critic", "actor")[: 1 + bool(rollout)]:
        assert_trained_as_paid(run, role, rollout, tokenizer, whitens=True)


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_the_critic_has_a_head_of_its_own_which_is_trained(run: Run, rollout: int) -> None:
    """One value per token, where a tied output layer would give one number for each word of the
    vocabulary."""
    for item in trained(run, "critic", rollout):
        assert item.row["values"].shape == item.row["returns"].shape == item.row["loss_masks"].shape
    gradients = [
        batch["gradient"]
        for record in run.records("critic", rollout)
        for batch in record["batches"]
    ]
    assert any(bool(gradient.any()) for gradient in gradients)


def test_the_engine_plays_with_the_actors_tied_weights(run: Run) -> None:
    """The actor changes in rollout 1; rollout 2 is played with what was pushed."""
    assert log_prob_gaps(run, ROLLOUTS - 1).max() < 0.05
