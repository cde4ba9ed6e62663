"""Resume: a stopped run continues with the very batches that an unbroken one would have played."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoint import checkpoint_path, load_source, read_checkpoint
from rollout.data_source import EpisodeSource
from rollout.errors import CheckpointError
from rollout.runtime import close_runtimes
from rollout.warmup import collect_or_draw
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
                batches.append(content(await collect_or_draw(args, k, source)))
                source.save(k)
        finally:
            await close_runtimes()
    return batches


@pytest.mark.parametrize("history", ["window", "full"])
@pytest.mark.parametrize("stop", [1, 3])
async def test_a_run_resumed_from_a_checkpoint_plays_the_same_batches(
    tmp_path: Path, stop: int, history: str
) -> None:
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
    (batch,) = await run(args, 1, 2, load=0)
    assert sum(sum(mask) > 0 for _, mask, *_ in batch) == 24


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await run(rollout_args(tmp_path, env={"max_length": 40}), 0, 1)
    return checkpoint_path(str(tmp_path / "save"), 0)


async def test_a_checkpoint_cut_at_any_byte_is_refused_whole(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    cuts = {0, 1, 7, 8, 9, len(whole) - 1, *range(0, len(whole), max(1, len(whole) // 60))}
    for cut in sorted(cuts):
        saved.write_bytes(whole[:cut])
        source = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path / "save")))
        with pytest.raises(CheckpointError, match="slime_verlog_0"):
            load_source(source, 0)
        assert (source.state, source.kept, source.next_group) == (None, [], 0)


async def test_a_checkpoint_with_any_flipped_bit_is_refused_or_reads_the_same(saved: Path) -> None:
    whole = saved.read_bytes()
    truth, _ = read_checkpoint(saved)
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        saved.write_bytes(damaged)
        try:
            state, _ = read_checkpoint(saved)
        except CheckpointError:
            continue
        assert state == truth


def test_a_missing_checkpoint_says_how_to_start_afresh(tmp_path: Path) -> None:
    source = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path)))
    with pytest.raises(CheckpointError, match="--start-rollout-id 0"):
        source.load(7)
    source.load(-1)
    source.load(None)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path = checkpoint_path(str(tmp_path), 3)
    path.parent.mkdir(parents=True)
    save_file({"weight": torch.zeros(3)}, path)
    source = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path)))
    with pytest.raises(CheckpointError, match="no rollout checkpoint"):
        source.load(3)


async def test_a_full_disk_leaves_the_previous_checkpoint_untouched(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollout.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        EpisodeSource(rollout_args(tmp_path)).save(0)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


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
