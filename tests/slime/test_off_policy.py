"""Corrections for turns of older weights, inside slime's own train.py: DIS with two critic passes,
and slime's TIS."""

from collections.abc import Callable

import pytest
import torch

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.altered_log_probs import EVERY
from tests.slime.cpu.harness import Run, micro_batches

pytestmark = pytest.mark.slow

ROLLOUTS = 2
FLAGS = f"--num-rollout {ROLLOUTS} --num-critic-only-steps 0"
STREAM = "--rollout-function-path rollout.continuous.generate_rollout"
DIS = "--use-rollout-logprobs --eps-clip 0.3 --eps-clip-high 5.0"


@pytest.fixture(scope="module")
def dis(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    flags = (*engine_flags(engine), FLAGS, STREAM, DIS)
    run = make_run("dis", *flags, policy_loss="dis", critic_updates=2)
    run.train()
    return run


def test_dis_trains_inside_slime_and_reports_what_it_masks(dis: Run) -> None:
    effective = dis.logged("train/dis_ess")
    assert len(effective) == ROLLOUTS * 2, "two optimizer steps per rollout"
    assert all(0.5 < value <= 1.0 + 1e-4 for value in effective)
    masked = [
        sum(values)
        for values in zip(*(dis.logged(f"train/dis_masked_{side}") for side in SIDES), strict=True)
    ]
    assert masked == pytest.approx(dis.logged("train/pg_clipfrac"), abs=1e-6)


SIDES = ("low_positive", "low_negative", "high_positive", "high_negative")


def test_the_critic_trains_twice_per_batch_and_the_actor_once(dis: Run) -> None:
    first, last = dis.logged("train/critic-pass1-value_loss"), dis.logged("train/critic-value_loss")
    assert len(first) == len(last) == ROLLOUTS * 2
    assert len(dis.logged("train/pg_loss")) == ROLLOUTS * 2


def test_slimes_own_importance_sampling_works_with_the_advantages_of_turns(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    run = make_run("tis", *engine_flags(engine), FLAGS, STREAM, "--use-tis")
    run.train()
    weights = run.logged("train/tis")
    assert len(weights) == ROLLOUTS * 2 and all(0.5 < weight < 2.0 for weight in weights)


@pytest.mark.parametrize("loss", ["dis", "ppo"])
def test_dis_masks_exactly_the_tokens_whose_recorded_log_probs_are_wrong(
    make_run: Callable[..., Run], engine: EngineServer, loss: str
) -> None:
    """PPO is the counter-test: it trains on some of these tokens."""
    one_step = "--num-rollout 1 --num-critic-only-steps 0 --global-batch-size 16"
    converter = "tests.slime.cpu.altered_log_probs.convert"
    run = make_run(
        f"altered-{loss}",
        *engine_flags(engine),
        one_step,
        DIS,
        f"--custom-convert-samples-to-train-data-path {converter}",
        policy_loss=loss,
    )
    run.train()
    (record,) = run.records("actor", 0)
    reached = {True: 0, False: 0}
    masked = 0.0
    for batch, numbers in micro_batches(record):
        start = 0
        weights = batch["weights"].split(batch["response_lengths"])
        for tokens, number, weight in zip(batch["tokens"], numbers, weights, strict=True):
            n = len(weight)
            gradient = batch["gradient"][start + len(tokens) - n - 1 : start + len(tokens) - 1]
            altered = torch.arange(n) % EVERY == 0
            masked += float(weight[altered].sum())
            trained = record["data"]["loss_masks"][number].bool()
            for changed in reached:
                reached[changed] += int((gradient[trained & (altered == changed)] > 0).sum())
            start += len(tokens)
    assert reached[False] > 50
    if loss == "ppo":
        assert reached[True] > 5
    else:
        assert reached[True] == 0
        assert run.logged("train/pg_clipfrac") == pytest.approx(
            [masked / len(run.turns(0))], rel=1e-4
        )
