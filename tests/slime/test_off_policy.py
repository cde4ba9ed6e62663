"""Corrections for turns of older weights, inside slime's own train.py: DIS with two critic passes, and slime's TIS."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run

pytestmark = pytest.mark.slow

ROLLOUTS = 2
FLAGS = ("--num-rollout", str(ROLLOUTS), "--num-critic-only-steps", "0")
STREAM = ("--rollout-function-path", "rollout.continuous.generate_rollout")
DIS = ("--use-rollout-logprobs", "--eps-clip", "0.3", "--eps-clip-high", "5.0")


def logged(run: Run, name: str) -> list[float]:
    return [float(v) for v in re.findall(rf"'{name}': ([-\d.e]+)", run.log.read_text(errors="replace"))]


@pytest.fixture(scope="module")
def dis(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    flags = (*engine_flags(engine), *FLAGS, *STREAM, *DIS)
    run = make_run("dis", *flags, policy_loss="dis", critic_updates=2)
    run.train()
    return run


def test_dis_trains_inside_slime_and_reports_what_it_masks(dis: Run) -> None:
    effective = logged(dis, "train/dis_ess")
    assert len(effective) == ROLLOUTS * 2, "two optimizer steps per rollout"
    assert all(0.5 < value <= 1.0 + 1e-4 for value in effective)
    masked = [sum(values) for values in zip(*(logged(dis, f"train/dis_masked_{side}") for side in SIDES), strict=True)]
    assert masked == pytest.approx(logged(dis, "train/pg_clipfrac"), abs=1e-6)


SIDES = ("low_positive", "low_negative", "high_positive", "high_negative")


def test_the_critic_trains_twice_per_batch_and_the_actor_once(dis: Run) -> None:
    first, last = logged(dis, "train/critic-pass1-value_loss"), logged(dis, "train/critic-value_loss")
    assert len(first) == len(last) == ROLLOUTS * 2
    assert len(logged(dis, "train/pg_loss")) == ROLLOUTS * 2


def test_slimes_own_importance_sampling_works_with_the_advantages_of_turns(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    run = make_run("tis", *engine_flags(engine), *FLAGS, *STREAM, "--use-tis")
    run.train()
    weights = logged(run, "train/tis")
    assert len(weights) == ROLLOUTS * 2 and all(0.5 < weight < 2.0 for weight in weights)
