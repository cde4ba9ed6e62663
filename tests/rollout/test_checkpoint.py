"""Resume: a stopped run continues with the same batches that an uninterrupted run plays."""

from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoint import checkpoint_path, read_state
from rollout.data_source import EpisodeSource
from rollout.errors import CheckpointError
from tests.fixtures import counting_env
from tests.fixtures.playing import Run, content, places_of, play_saved, playing, turns_of
from tests.fixtures.rollout_args import rollout_args

KEYS = {"turn_quota": "per_env", "env": {"max_length": 40}}
LONG = {"env": {"max_length": 40}, "seed_start": 3}


async def play(folder: Path, first: int, last: int, **keys: Any) -> list[Any]:
    outputs, _ = await play_saved(folder, first, last, **keys)
    return outputs


@pytest.mark.parametrize(("history", "stop"), [("window", 1), ("full", 3)])
async def test_a_run_resumed_from_a_checkpoint_plays_the_same_batches(
    tmp_path: Path, stop: int, history: str
) -> None:
    whole = await play(tmp_path, 0, 5, **KEYS, history=history)
    assert content(*whole[stop:]) == content(
        *await play(tmp_path, stop, 5, **KEYS, history=history)
    )


async def test_the_warm_up_buffer_survives_a_restart(tmp_path: Path) -> None:
    keys = {
        "critic_warmup": {"w_epoch": 3, "w_iter": 2, "fraction": 0.5},
        "num_critic_only_steps": 5,
        **KEYS,
    }
    whole = await play(tmp_path, 0, 6, **keys)
    for first in (2, 4):
        assert content(*whole[first:]) == content(*await play(tmp_path, first, 6, **keys))


async def test_an_episode_whose_replay_differs_is_dropped_and_counted(tmp_path: Path) -> None:
    keys = {**KEYS, "env": {"max_length": 40, "lie": True}}
    await play(tmp_path, 0, 1, **keys)
    (output,) = await play(tmp_path, 1, 2, **keys)
    assert len(turns_of(output)) == 24
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == live_episodes(tmp_path) > 0


def live_episodes(folder: Path) -> int:
    """Live episodes in the checkpoint of rollout 0."""
    state = read_state(checkpoint_path(str(folder / "save"), 0))
    return sum(slot["episode"] is not None for slot in state.slots)


@pytest.mark.parametrize(("n_env", "lost"), [(2, 2), (6, 0)])
async def test_with_another_number_of_slots_as_many_episodes_as_fit_continue_and_the_rest_is_counted(
    tmp_path: Path, n_env: int, lost: int
) -> None:
    (before,) = await play(tmp_path, 0, 1, **LONG)
    assert live_episodes(tmp_path) == 4
    after = await play(tmp_path, 1, 3, **LONG, n_env=n_env)
    assert [output.metrics["rollout/faults/episodes_lost_at_resume"] for output in after] == [
        lost,
        0,
    ]
    went_on = [place for output in after for place in sorted(places_of(output))]
    assert len(set(went_on)) == len(went_on) and not set(places_of(before)) & set(went_on)
    cut, first = dict(sorted(places_of(before))), dict(reversed(went_on))
    assert sum(turn == cut.get(episode, -2) + 1 for episode, turn in first.items()) == 4 - lost
    assert all(turn == 0 for episode, turn in first.items() if episode not in cut)


@pytest.mark.parametrize(
    "change", [{"env": {"max_length": 41}}, {"seed_start": 4}, {"path": "a file of the user's"}]
)
async def test_episodes_that_the_configuration_no_longer_plays_are_counted_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    await play(tmp_path, 0, 1, **LONG)
    if change.pop("path", None):
        copy = tmp_path / "counting.py"
        source = Path(counting_env.__file__)
        copy.write_text(source.read_text().replace("Path(__file__)", f"Path({str(source)!r})"))
        change = {"rollout_interaction_env_path": str(copy)}
    (output,) = await play(tmp_path, 1, 2, **{**LONG, **change})
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == live_episodes(tmp_path) == 4
    assert "given up" in caplog.text and "the configuration" in caplog.text
    assert len(turns_of(output)) == 24


@pytest.mark.parametrize(
    "warmup", [{}, {"critic_warmup": {"w_epoch": 2, "w_iter": 1, "fraction": 0.5}}]
)
async def test_a_step_saved_after_the_next_batch_was_played_resumes_before_that_batch(
    tmp_path: Path, warmup: dict[str, Any]
) -> None:
    """The order of calls in slime's train_async.py: generate(r + 1) comes before save(r)."""
    keys = {"num_critic_only_steps": 3 * bool(warmup), **KEYS, **warmup}
    whole = await play(tmp_path / "straight", 0, 5, **keys)
    async with playing(tmp_path, **keys) as run:
        for k in range(3):
            run.engine.version = str(k + 1)
            await run.batch(k)
            if k:
                run.source.save(k - 1)
    assert content(*whole[2:]) == content(*await play(tmp_path, 2, 5, **keys))


async def test_the_state_is_on_the_disk_before_slime_saves_the_models(tmp_path: Path) -> None:
    async with playing(tmp_path, save_interval=2, num_rollout=4) as run:
        there = []
        for k in range(3):
            await run.batch(k)
            there.append(checkpoint_path(run.args.save, k).exists())
        assert there == [False, True, False]
        with pytest.raises(CheckpointError, match="rollout 0 is not known"):
            run.source.save(0)


async def test_a_checkpoint_cannot_name_the_code_that_runs(tmp_path: Path) -> None:
    """The episodes of a checkpoint that names another environment are given up; that environment is
    never imported."""
    await play(tmp_path, 0, 1, **LONG)
    trap, sprung = tmp_path / "trap.py", tmp_path / "sprung"
    trap.write_text(f"open({str(sprung)!r}, 'w').close()\n")
    source = Run(tmp_path, load=0, **LONG).source
    for slot in source.saved_slots:
        slot["episode"]["spec"]["env_path"] = str(trap)
    source.save(0)
    (output,) = await play(tmp_path, 1, 2, **LONG)
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == 4 and not sprung.exists()


def test_a_run_resumed_while_the_actor_is_frozen_finds_its_episodes_where_it_saved_them(
    tmp_path: Path,
) -> None:
    source = Run(tmp_path).source
    source.get_samples(3)
    source.save(0)
    again = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path / "initial_weights")))
    again.load(0)
    assert again.next_episode == 3
