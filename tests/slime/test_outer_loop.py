"""Whole episodes inside slime's own rollout loops: over-sampling, abort, partial rollout, filters,
and fully async."""

from collections.abc import Callable
from typing import Any

import pytest

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, roles
from tests.slime.cpu.harness import Run, place_of
from tests.slime.expectation import assert_trained_as_paid, positions

pytestmark = pytest.mark.slow

GENERATE = "--custom-generate-function-path rollout.generate.generate"
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
EPISODES = "--rollout-batch-size 6 --global-batch-size 6"


def episodes(run: Run, rollout: int) -> dict[int, list[dict[str, Any]]]:
    """The samples of each episode, in order, by training group."""
    found: dict[int, list[dict[str, Any]]] = {}
    for sample in run.samples(rollout):
        found.setdefault(sample.get("rollout_id", sample.get("group_id")), []).append(sample)
    return found


@pytest.fixture(scope="module")
def partial(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    """Twice as many episodes as wanted are begun; what is left when the batch is full is aborted
    and comes back."""
    run = make_run(
        "partial",
        *engine_flags(engine),
        "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout",
        GENERATE,
        EPISODES,
        "--over-sampling-batch-size 12 --partial-rollout --mask-offpolicy-in-partial-rollout",
        "--num-rollout 3 --eval-interval 3 --eval-prompt-data held-out unused",
        "--eval-function-path rollout.fixed_turn.generate_rollout --save-interval 5",
        n_env=2,
    )
    critic = roles(run.work / "roles.yaml", {"save": str(run.work / "critic")}, {})
    run.train([f"--save {run.work}/checkpoints", *critic])
    return run


def test_aborted_episodes_go_on_under_the_new_weights(partial: Run) -> None:
    mixed = [
        turns
        for rollout in (1, 2)
        for turns in episodes(partial, rollout).values()
        if len(versions_of(turns)) > 1
    ]
    assert mixed, "no episode was aborted and continued"
    for turns in mixed:
        assert [t["metadata"]["round_number"] for t in turns] == list(range(len(turns)))
        assert versions_of(turns) == sorted(versions_of(turns))


def versions_of(turns: list[dict[str, Any]]) -> list[int]:
    return list(
        dict.fromkeys(int(version) for turn in turns for version in turn["weight_versions"])
    )


def test_turns_from_before_the_update_are_masked_and_later_ones_are_not(partial: Run) -> None:
    for rollout in (0, 1, 2):
        # An episode that ended just as slime aborted comes back whole, and is masked whole.
        newest = rollout + 1
        for turn in (turn for turns in episodes(partial, rollout).values() for turn in turns):
            assert all(turn["loss_mask"]) == (int(turn["weight_versions"][-1]) == newest)


def test_no_turn_is_played_twice_and_none_is_lost(partial: Run) -> None:
    played = [place_of(sample) for rollout in range(3) for sample in partial.samples(rollout)]
    assert len(set(played)) == len(played)
    told = {(seed, turn) for seed, turn, _ in partial.payments() if seed < 1_000_000_000}
    assert set(played) <= told
    assert all(len(episodes(partial, rollout)) == 6 for rollout in range(3))


@pytest.mark.parametrize("rollout", range(3))
def test_advantages_of_whole_episodes_equal_what_was_paid(
    partial: Run, rollout: int, tokenizer: Any
) -> None:
    for role in ("actor", "critic"):
        assert_trained_as_paid(partial, role, rollout, tokenizer)


@pytest.fixture(scope="module")
def groups(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    """GRPO without a critic: slime's converter, filter and group normalisation over one sample an
    episode."""
    run = make_run(
        "groups",
        *engine_flags(engine),
        "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout",
        GENERATE,
        "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --num-rollout 2",
        f"--dynamic-sampling-filter-path {FILTERS}.check_reward_nonzero_std",
        "--over-sampling-batch-size 6 --advantage-estimator grpo",
        history="full",
    )
    run.train(without=("custom_convert_samples_to_train_data_path", "custom_megatron_init_path"))
    return run


def test_slimes_filter_and_group_estimator_work_on_whole_episodes(groups: Run) -> None:
    for rollout in (0, 1):
        samples = groups.samples(rollout)
        assert len(samples) == 8
        for k in range(0, 8, 2):
            first, second = samples[k : k + 2]
            assert first["metadata"]["seed"] == second["metadata"]["seed"]
            assert first["reward"] != second["reward"]
        (record,) = groups.records("actor", rollout)
        advantages = [float(a[0]) for a in record["data"]["advantages"]]
        order = list(positions(record["data"], samples))
        for k in range(0, 8, 2):
            pair = [advantages[order.index(k)], advantages[order.index(k + 1)]]
            assert sum(pair) == pytest.approx(0.0, abs=1e-4) and abs(pair[0]) > 0.5


@pytest.fixture(scope="module")
def asynchronous(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    """slime's fully async rollout: a thread and an event loop of its own keep playing across
    updates."""
    run = make_run(
        "asynchronous",
        *engine_flags(engine),
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        GENERATE,
        EPISODES,
        "--num-rollout 3 --sglang-server-concurrency 8",
    )
    run.train()
    return run


def test_fully_async_batches_are_whole_and_trained_on_exactly(
    asynchronous: Run, tokenizer: Any
) -> None:
    played = []
    for rollout in range(3):
        found = episodes(asynchronous, rollout)
        assert len(found) == 6
        for turns in found.values():
            assert [t["metadata"]["round_number"] for t in turns] == list(range(len(turns)))
        played += map(place_of, asynchronous.samples(rollout))
        assert_trained_as_paid(asynchronous, "actor", rollout, tokenizer)
    assert len(set(played)) == len(played)
