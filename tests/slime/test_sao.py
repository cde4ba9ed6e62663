"""`preset: sao` inside slime's own train.py: lambdas, frozen attention, values, staleness, and a
resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run
from tests.slime.expectation import (
    critic_targets,
    expected_advantages,
    largest_difference,
    payments_of,
)
from tests.slime.test_off_policy import DIS, STREAM
from tests.slime.test_resume import script_arguments
from tests.slime.test_train_loop import trained

pytestmark = pytest.mark.slow

ROLLOUTS = 3
FLAGS = f"--num-rollout {ROLLOUTS} --num-critic-only-steps 0 {STREAM} {DIS}"


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    experiment = make_run("sao", *engine_flags(engine), FLAGS, preset="sao")
    experiment.train(script_arguments(experiment))
    return experiment


def parameters(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a Megatron checkpoint, without the optimizer's."""
    dcp_to_torch_save(folder, tmp_path / "flat.pt")
    state = torch.load(tmp_path / "flat.pt", weights_only=False)
    return {
        k: v
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and k.startswith(("decoder", "embedding"))
    }


def moved(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> set[str]:
    assert old.keys() == new.keys() and len(old) > 5
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_the_critics_attention_stays_bit_identical_over_three_rollouts_and_everything_else_moves(
    run: Run, tmp_path: Path
) -> None:
    start = parameters(Path(run.reference) / "release", tmp_path)
    critic = moved(start, parameters(run.work / "critic" / "iter_0000002", tmp_path))
    actor = moved(start, parameters(run.work / "actor" / "iter_0000002", tmp_path))
    attention = {
        name for name in start if "self_attention.linear" in name and "layer_norm" not in name
    }
    assert attention and critic == set(start) - attention
    assert actor == set(start)
    assert "the critic does not train" in run.log.read_text(errors="replace")


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_the_critics_targets_are_discounted_returns_and_the_actors_lambda_follows_the_turns_length(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    items = trained(run, "critic", rollout)
    paid = payments_of(items, run.payments(), tokenizer)
    ones = {"lambda_step": 1.0, "lambda_token": 1.0}
    targets = critic_targets(items, expected_advantages(items, paid, **ones))
    assert largest_difference(items, "returns", targets) < 2e-5
    items = trained(run, "actor", rollout)
    adaptive = {"lambda_step": 1.0, "lambda_token": lambda n: max(0.0, 1 - 1 / (1.5 * n))}
    assert (
        largest_difference(items, "advantages", expected_advantages(items, paid, **adaptive)) < 2e-5
    )
    assert largest_difference(items, "advantages", expected_advantages(items, paid, **ones)) > 1e-3


def test_every_token_has_the_staleness_of_its_turn(run: Run) -> None:
    stale = [run.logged(f"train/dis_stale{age}_share") for age in range(3)]
    assert len(stale[0]) == ROLLOUTS * 2, "two optimizer steps per rollout"
    assert all(sum(shares) == pytest.approx(1, abs=1e-4) for shares in zip(*stale, strict=True))
    assert max(stale[1]) > 0 and max(stale[2]) == 0, "max_staleness is 1"
    assert all(0 < share <= 1 + 1e-4 for share in run.logged("train/dis_stale1_ess"))
    assert run.logged("train/off_policy_alarms")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_actor_gets_the_critics_values_from_before_or_after_its_update(
    run: Run, make_run: Callable[..., Run], engine: EngineServer, when: str
) -> None:
    if when == "after":
        run = make_run(
            "after",
            *engine_flags(engine),
            FLAGS,
            "--num-rollout 1",
            preset="sao",
            actor_values="after",
        )
        run.train(script_arguments(run))
    pairs = zip(trained(run, "critic", 0), trained(run, "actor", 0), strict=True)
    gap = max(
        float((critic.row["values"] - actor.row["values"]).abs().max()) for critic, actor in pairs
    )
    assert (gap == 0) == (when == "before")


def test_a_resume_with_another_list_of_frozen_parameters_is_refused(
    run: Run, make_run: Callable[..., Run], engine: EngineServer
) -> None:
    changed = make_run("sao", *engine_flags(engine), FLAGS, preset="sao", critic_frozen=[])
    text = changed.refusal(script_arguments(changed))
    assert "critic was trained with frozen parameters ['self_attention" in text, changed.tail()
