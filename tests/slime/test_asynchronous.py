"""slime's own train_async.py, and slots that play while slime trains: versions, saved states,
kills, staleness."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedded.engine.server import EngineServer
from rollout.checkpoint import load_state
from tests.fixtures.playing import no_gap_and_none_twice
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run, place_of, stop_all
from tests.slime.test_resume import saved_step, script_arguments, state_of, wait_for

pytestmark = pytest.mark.slow

ROLLOUTS = 4
STREAMED = 7
CONTINUOUS = "--rollout-function-path rollout.continuous.generate_rollout"
WANDB = "--use-wandb --wandb-mode offline --wandb-project test --wandb-group test"
FLAGS = f"--num-rollout {ROLLOUTS} --num-critic-only-steps 0"


def places(run: Run, rollouts: range) -> list[tuple[int, int]]:
    """(episode, turn index) of every turn that was handed to training."""
    return [place_of(turn) for rollout in rollouts for turn in run.turns(rollout)]


@pytest.fixture(scope="module")
def fixed(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    """Fixed-turn batches under train_async.py."""
    run = make_run("async", *engine_flags(engine), FLAGS, WANDB, script="train_async.py")
    run.train(script_arguments(run))
    return run


def test_each_batch_is_played_by_the_weights_before_the_last_update(fixed: Run) -> None:
    assert fixed.versions(range(ROLLOUTS)) == [{1}, {1}, {2}, {3}]
    assert sorted(set(fixed.logged("turn/staleness"))) == [0.0, 1.0]


def test_the_state_of_a_step_is_the_state_after_its_batch_not_after_the_next_one(
    fixed: Run,
) -> None:
    folder = str(fixed.work / "actor")
    for rollout in range(ROLLOUTS):
        state = load_state(folder, folder, rollout)
        assert state is not None
        played = Counter(episode for episode, _ in places(fixed, range(rollout + 1)))
        live = {
            slot["episode"]["spec"]["episode_id"]: slot["episode"]
            for slot in state.slots
            if slot["episode"]
        }
        assert all(len(episode["answers"]) == played[number] for number, episode in live.items())
        assert state.next_group == (rollout + 1) * 16


STREAMS = {
    "train.py, wait": ("train.py", {"max_staleness": 1}),
    "train.py, mask": ("train.py", {"max_staleness": 1, "stale_turns": "mask"}),
    "train_async.py, wait": ("train_async.py", {"max_staleness": 2}),
}


@pytest.fixture(scope="module", params=STREAMS)
def stream(request: Any, make_run: Callable[..., Run], engine: EngineServer, ground: Path) -> Run:
    """Continuous batches, and one environment step that lasts until batch 5 is there; with `wait`,
    which that would keep from ever being there, 25 s.

    With train_async.py, a batch is complete before the push, so 2 updates are allowed.
    """
    script, settings = STREAMS[request.param]
    name = f"stream{list(STREAMS).index(request.param)}"  # short, because sockets lie below it
    work = ground / name
    slow = {
        "seed": 1,
        "until": str(work / "samples" / "5.pt"),
        "at_most_s": 600 if "mask" in request.param else 25,
    }
    env = {"ledger": str(work / "ledger"), "longest": 9, "slow": slow}
    flags = (
        *engine_flags(engine),
        CONTINUOUS,
        f"--num-rollout {STREAMED} --num-critic-only-steps 0",
    )
    run = make_run(
        name, *flags, script=script, env=env, env_workers=9, env_step_timeout_s=900.0, **settings
    )
    run.train(script_arguments(run))
    return run


def test_no_turn_of_a_stream_is_lost_or_trained_twice(stream: Run) -> None:
    played = places(stream, range(STREAMED))
    assert len(played) == STREAMED * 16
    no_gap_and_none_twice(played)


def test_turns_of_a_stream_are_played_while_slime_trains_and_none_that_is_trained_is_too_old(
    stream: Run,
) -> None:
    """Also not the turn whose environment step outlasts several batches."""
    limit, old = stream.config["max_staleness"], 0
    for rollout in range(STREAMED):
        for sample in stream.turns(rollout):
            (version,) = sample["weight_versions"]
            age = rollout - (int(version) - 1)
            assert age >= 0
            if any(sample["loss_mask"]):
                assert age <= limit
            else:
                assert age > limit, "only turns that are too old are masked"
                old += 1
    assert max(stream.logged("turn/staleness_max")) >= 1
    assert sum(stream.logged("rollout/turns_masked_as_stale")) == old
    assert old == (stream.config.get("stale_turns") == "mask")


def test_staleness_is_counted_in_slimes_absolute_rollout_ids_after_a_resume(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    """train_async.py pushes after rollouts 2 and 5; batch r + 1 is played while batch r is trained
    on, before a push.

    The resumed run begins at 2, so its pushes are not every three rollouts from its beginning.
    """
    run = make_run("interval", *engine_flags(engine), INTERVAL, script="train_async.py")
    run.train([*script_arguments(run), "--num-rollout 2"])
    # Megatron refuses another number of rollouts than the checkpoint's without this flag.
    run.train([*script_arguments(run), "--num-rollout 8 --override-opt-param-scheduler"])
    assert run.logged("turn/staleness") == [0, 1, 0, 1, 1, 2, 3, 1], "first run, resumed run"


def test_train_py_pushes_after_every_rollout_whatever_the_interval(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    run = make_run("no-interval", *engine_flags(engine), INTERVAL, "--num-rollout 3")
    run.train()
    assert run.logged("turn/staleness") == [0, 0, 0]
    assert run.versions(range(3)) == [{1}, {2}, {3}]


INTERVAL = "--num-critic-only-steps 0 --update-weights-interval 3"


@pytest.mark.parametrize("flags", ["", CONTINUOUS], ids=["fixed-turn", "continuous"])
def test_a_killed_asynchronous_run_goes_on_without_a_gap(
    make_run: Callable[..., Run], engine: EngineServer, flags: str
) -> None:
    """Killed while the batch after the saved step is being trained on."""
    name = "killed-async" + "-stream" * bool(flags)
    run = make_run(
        name, *engine_flags(engine), FLAGS, flags, script="train_async.py", max_staleness=2
    )
    process = run.start(script_arguments(run))
    wait_for(run, process, lambda: models_saved(run) >= 1)
    stop_all(run.work)
    process.wait(60)
    last = models_saved(run)
    assert state_of(run, last).exists(), "no model is without its state"
    before = places(run, range(last + 1))
    run.train(script_arguments(run))
    played = [*before, *places(run, range(last + 1, ROLLOUTS))]
    assert len(played) == ROLLOUTS * 16
    no_gap_and_none_twice(played)


def models_saved(run: Run) -> int:
    """The newest step whose actor and critic are on the disk; -1 if there is none."""
    return min(saved_step(run, role) for role in ("actor", "critic"))
