"""Resume: a stopped run continues with the same batches that an uninterrupted run plays."""

import random
from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoint import checkpoint_path, read_checkpoint
from rollout.data_source import EpisodeSource
from rollout.errors import CheckpointError
from rollout.fixed_turn import collect_or_draw
from rollout.play.runtime import close_runtimes
from tests.fixtures import counting_env
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw


def plays(body: dict[str, Any], number: int) -> str:
    return ("THINK: so.\nACTION: left", "right", "ACTION: dance")[draw(body, 3)]


def content(output: Any) -> list[Any]:
    return [
        (s.tokens, s.loss_mask, s.rollout_log_probs, s.reward, s.rollout_id, s.train_metadata)
        for group in output.samples
        for s in group
    ]


async def run(args: Any, first: int, last: int, load: int | None = None) -> list[Any]:
    """What batches first..last-1 hold; see `outputs`."""
    return [content(output) for output in await outputs(args, first, last, load)]


async def outputs(args: Any, first: int, last: int, load: int | None = None) -> list[Any]:
    """Batches first..last-1, saving after each; `load` restores a step into a new source first."""
    batches = []
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        jitter = random.Random(first)
        engine.delay = lambda number: jitter.random() * 0.005
        args.sglang_router_port = engine.port
        source = EpisodeSource(args)
        if load is not None:
            source.load(load)
        try:
            for k in range(first, last):
                engine.version = str(k + 1)
                batches.append(await collect_or_draw(args, k, source))
                source.save(k)
        finally:
            await close_runtimes()
    return batches


@pytest.mark.parametrize("history", ["window", "full"])
@pytest.mark.parametrize("stop", [1, 3])
async def test_a_run_resumed_from_a_checkpoint_plays_the_same_batches(tmp_path: Path, stop: int, history: str) -> None:
    keys = {"turn_quota": "per_env", "env": {"max_length": 40}, "history": history}
    whole = await run(rollout_args(tmp_path, **keys), 0, 5)
    args = rollout_args(tmp_path, **keys, load=str(tmp_path / "save"))
    assert whole[stop:] == await run(args, stop, 5, load=stop - 1)


async def test_the_warm_up_buffer_survives_a_restart(tmp_path: Path) -> None:
    keys = {
        "turn_quota": "per_env",
        "env": {"max_length": 40},
        "critic_warmup": {"w_epoch": 3, "w_iter": 2, "fraction": 0.5},
        "num_critic_only_steps": 5,
    }
    whole = await run(rollout_args(tmp_path, **keys), 0, 6)
    args = rollout_args(tmp_path, **keys, load=str(tmp_path / "save"))
    assert whole[2:] == await run(args, 2, 6, load=1)
    assert whole[4:] == await run(args, 4, 6, load=3)


async def test_an_episode_whose_replay_differs_is_dropped_and_counted(tmp_path: Path) -> None:
    keys = {"turn_quota": "per_env", "env": {"max_length": 40, "lie": True}}
    await run(rollout_args(tmp_path, **keys), 0, 1)
    args = rollout_args(tmp_path, **keys, load=str(tmp_path / "save"))
    (output,) = await outputs(args, 1, 2, load=0)
    assert sum(sum(mask) > 0 for _, mask, *_ in content(output)) == 24
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == live_episodes(tmp_path) > 0


def live_episodes(folder: Path) -> int:
    """Live episodes in the checkpoint of rollout 0."""
    state, _ = read_checkpoint(checkpoint_path(str(folder / "save"), 0))
    return sum(slot["episode"] is not None for slot in state["slots"])


LONG = {"env": {"max_length": 40}, "seed_start": 3}


@pytest.mark.parametrize(("n_env", "lost"), [(2, 2), (6, 0)])
async def test_with_another_number_of_slots_as_many_episodes_as_fit_continue_and_the_rest_is_counted(
    tmp_path: Path, n_env: int, lost: int
) -> None:
    (before,) = await outputs(rollout_args(tmp_path, **LONG), 0, 1)
    assert live_episodes(tmp_path) == 4
    args = rollout_args(tmp_path, **LONG, n_env=n_env, load=str(tmp_path / "save"))
    after = await outputs(args, 1, 3, load=0)
    assert after[0].metrics["rollout/faults/episodes_lost_at_resume"] == lost
    assert after[1].metrics["rollout/faults/episodes_lost_at_resume"] == 0
    went_on = [key for output in after for key in played(output)]
    assert len(set(went_on)) == len(went_on) and not set(played(before)) & set(went_on)
    cut, first = dict(played(before)), dict(reversed(went_on))
    assert sum(turn == cut.get(episode, -2) + 1 for episode, turn in first.items()) == 4 - lost
    assert all(turn == 0 for episode, turn in first.items() if episode not in cut)


def played(output: Any) -> list[tuple[int, int]]:
    """Episode and index of every turn, in order."""
    return sorted(
        (s.metadata["episode_id"], s.metadata["round_number"])
        for group in output.samples
        for s in group
        if s.metadata["kind"] == "turn"
    )


@pytest.mark.parametrize("change", [{"env": {"max_length": 41}}, {"seed_start": 4}, {"path": "a file of the user's"}])
async def test_episodes_that_the_configuration_no_longer_plays_are_counted_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    await outputs(rollout_args(tmp_path, **LONG), 0, 1)
    if change.pop("path", None):
        copy = tmp_path / "counting.py"
        source = Path(counting_env.__file__)
        copy.write_text(source.read_text().replace("Path(__file__)", f"Path({str(source)!r})"))
        change = {"rollout_interaction_env_path": str(copy)}
    args = rollout_args(tmp_path, **{**LONG, **change}, load=str(tmp_path / "save"))
    (output,) = await outputs(args, 1, 2, load=0)
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == live_episodes(tmp_path) == 4
    assert "given up" in caplog.text and "the configuration" in caplog.text
    assert len(played(output)) == 24


@pytest.mark.parametrize("warmup", [{}, {"critic_warmup": {"w_epoch": 2, "w_iter": 1, "fraction": 0.5}}])
async def test_a_step_saved_after_the_next_batch_was_played_resumes_before_that_batch(
    tmp_path: Path, warmup: dict[str, Any]
) -> None:
    """The order of calls in slime's train_async.py: generate(r + 1) comes before save(r)."""
    keys = {"turn_quota": "per_env", "env": {"max_length": 40}, "num_critic_only_steps": 3 * bool(warmup), **warmup}
    whole = await run(rollout_args(tmp_path / "straight", **keys), 0, 5)
    args = rollout_args(tmp_path, **keys)
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args.sglang_router_port = engine.port
        source = EpisodeSource(args)
        try:
            for k in range(3):
                await collect_or_draw(args, k, source)
                if k:
                    source.save(k - 1)
        finally:
            await close_runtimes()
    args = rollout_args(tmp_path, **keys, load=str(tmp_path / "save"))
    assert whole[2:] == await run(args, 2, 5, load=1)


async def test_the_state_is_on_the_disk_before_slime_saves_the_models(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, save_interval=2, num_rollout=4)
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args.sglang_router_port = engine.port
        source = EpisodeSource(args)
        try:
            there = []
            for k in range(3):
                await collect_or_draw(args, k, source)
                there.append(checkpoint_path(args.save, k).exists())
            assert there == [False, True, False]
            with pytest.raises(CheckpointError, match="rollout 0 is not known"):
                source.save(0)
        finally:
            await close_runtimes()


async def test_a_checkpoint_cannot_name_the_code_that_runs(tmp_path: Path) -> None:
    """The episodes of a checkpoint that names another environment are given up; that environment is never imported."""
    await outputs(rollout_args(tmp_path, **LONG), 0, 1)
    trap, sprung = tmp_path / "trap.py", tmp_path / "sprung"
    trap.write_text(f"open({str(sprung)!r}, 'w').close()\n")
    args = rollout_args(tmp_path, **LONG, load=str(tmp_path / "save"))
    source = EpisodeSource(args)
    source.load(0)
    for slot in source.saved_slots:
        slot["episode"]["spec"]["env_path"] = str(trap)
    source.save(0)
    (output,) = await outputs(args, 1, 2, load=0)
    assert output.metrics["rollout/faults/episodes_lost_at_resume"] == 4 and not sprung.exists()


def test_groups_that_were_aborted_are_handed_out_again_after_a_restart(tmp_path: Path) -> None:
    source = EpisodeSource(rollout_args(tmp_path, n_samples_per_prompt=2))
    _, second = source.get_samples(2)
    source.add_samples([second])
    source.save(0)
    again = EpisodeSource(rollout_args(tmp_path, n_samples_per_prompt=2, load=str(tmp_path / "save")))
    again.load(0)
    (group, fresh) = again.get_samples(2)
    assert [s.index for s in group] == [s.index for s in second]
    assert group[0].metadata == second[0].metadata and fresh[0].index > second[1].index


def test_a_run_resumed_while_the_actor_is_frozen_finds_its_episodes_where_it_saved_them(tmp_path: Path) -> None:
    source = EpisodeSource(rollout_args(tmp_path))
    source.get_samples(3)
    source.save(0)
    again = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path / "initial_weights")))
    again.load(0)
    assert again.next_episode == 3
