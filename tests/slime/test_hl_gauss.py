"""slime's own train.py over two ranks with a classification head: two updates, the checkpoint, and
a wrong head."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from advantage.hl_gauss import HlGauss
from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run
from tests.slime.expectation import (
    Trained,
    assert_as_paid,
    assert_trained_as_paid,
    payments_of,
    trained_samples,
)
from tests.slime.test_resume import script_arguments
from tests.slime.test_train_loop import group, trained

pytestmark = pytest.mark.slow

ROLLOUTS = 2
HEAD = {"value_loss": "hl_gauss", "value_bins": 21, "value_range": [-1.0, 9.0]}
BINS = HlGauss(-1.0, 9.0, 21, 0.75)
FLAGS = f"--num-rollout {ROLLOUTS} --num-critic-only-steps 0 --normalize-advantages"


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    experiment = make_run("bins", *engine_flags(engine), FLAGS, gpus=2, critic_updates=2, **HEAD)
    experiment.train(script_arguments(experiment))
    return experiment


def test_the_first_values_are_zero_and_the_next_are_not(run: Run) -> None:
    first, second = (
        torch.cat([item.row["values"] for item in trained(run, "critic", k)])
        for k in range(ROLLOUTS)
    )
    assert float(first.abs().max()) < 0.05 * BINS.width
    assert float((second - first.mean()).abs().min()) > 0.02


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_advantages_and_value_targets_are_those_of_what_was_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    for role in ("critic", "actor"):
        assert_trained_as_paid(run, role, rollout, tokenizer, whitens=True)


def first_loss(items: Sequence[Trained]) -> float:
    """The cross-entropy of the first optimizer step, whose outputs are those of the start."""
    turns = [item for item in items if not item.is_bootstrap]
    turns.sort(key=lambda item: group(item.sample))
    start, expected = BINS.start_bias().float(), 0.0
    for item in turns[:8]:  # all tokens of a turn have one return
        returns = item.row["returns"]
        weight = (3.0 + len(returns) - 1) / len(returns)
        expected += weight * float(BINS.loss(start, returns[0])) / 8
    return expected


def test_the_loss_is_cross_entropy_and_the_numbers_of_unseen_turns_are_logged_once_per_batch(
    run: Run,
) -> None:
    losses = run.logged("train/critic-pass1-value_loss")
    assert losses[0] == pytest.approx(first_loss(trained(run, "critic", 0)), rel=0.01)
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))
    assert not run.logged("train/critic-value_clipfrac")
    explained = run.logged("train/critic-explained_variance")
    assert len(explained) == ROLLOUTS and explained[0] == pytest.approx(0, abs=1e-3)
    assert run.logged("train/critic-return_outside_share") and run.logged(
        "train/critic-explained_variance_last_tenth"
    )


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_ranks_share_the_head(
    make_run: Callable[..., Run],
    engine: EngineServer,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """Each rank holds a part of one critic and all turns; what the last rank recorded is
    compared."""
    # Megatron asks for it, also without a GPU.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = (FLAGS, f"--num-rollout 1 --{layout}-model-parallel-size 2")
    shared = make_run(layout, *engine_flags(engine), *flags, gpus=2, critic_updates=2, **HEAD)
    shared.train(script_arguments(shared))
    for role in ("critic", "actor"):
        items = trained_samples(shared.records(role, 0)[-1:], shared.samples(0))
        assert_as_paid(items, payments_of(items, shared.payments(), tokenizer), whitens=True)
        if role == "critic":
            losses = shared.logged("train/critic-pass1-value_loss")
            assert losses[0] == pytest.approx(first_loss(items), rel=0.01)
            assert sum(shared.logged("train/critic-value_loss")) < sum(losses), (
                "the second pass has the same turns"
            )


def test_the_checkpoint_has_the_head_and_says_so(run: Run) -> None:
    folder = run.work / "critic" / f"iter_{ROLLOUTS - 1:07d}"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        tuple(entry.size) for name, entry in entries.items() if name.endswith("output_layer.weight")
    }
    assert 21 in {shape[0] for shape in shapes}
    assert "the critic's head is value_loss: hl_gauss, value_bins: 21" in run.log.read_text(
        errors="replace"
    )


def test_a_resume_with_another_head_is_refused(
    run: Run, make_run: Callable[..., Run], engine: EngineServer
) -> None:
    changed = make_run("bins", *engine_flags(engine), FLAGS, gpus=2, value_loss="mse")
    text = changed.refusal(script_arguments(changed))
    assert "has the head value_loss: hl_gauss, value_bins: 21" in text, changed.tail()
    assert "the YAML asks for value_loss: mse, which would start untrained" in text
