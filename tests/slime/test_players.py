"""slime's own train.py with `rollout_processes: 2`: two Ray actors play, and slime's process keeps
the batch."""

from collections.abc import Callable
from typing import Any

import pytest

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, roles
from tests.slime.cpu.harness import Run, place_of
from tests.slime.expectation import assert_trained_as_paid

pytestmark = pytest.mark.slow

ROLLOUTS = 3


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], engine: EngineServer, ground: Any) -> Run:
    work = ground / "players"
    experiment = make_run(
        "players",
        *engine_flags(engine),
        f"--num-rollout {ROLLOUTS} --num-critic-only-steps 0",
        "--eval-interval 3 --eval-prompt-data held-out unused",
        *roles(work / "roles.yaml", {"lr": 5e-3}, {"lr": 1e-3}),
        rollout_processes=2,
    )
    experiment.train()
    return experiment


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_the_advantages_are_those_of_what_the_environments_in_both_players_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    assert_trained_as_paid(run, "actor", rollout, tokenizer)


def test_two_processes_played_and_no_turn_is_missing_or_twice(run: Run) -> None:
    text = run.log.read_text(errors="replace")
    assert all(f"rollout/process/{number}/host_busy_share" in text for number in (0, 1))
    played = []
    for rollout in range(ROLLOUTS):
        turns = run.turns(rollout)
        assert len(turns) == 16
        played += map(place_of, turns)
    assert len(set(played)) == len(played)
