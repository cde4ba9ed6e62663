"""Same seeds and same engine answers give the same bytes, in any order of completion and with any
backend."""

import random
from pathlib import Path
from typing import Any

import pytest

from rollout.data_source import EpisodeSource
from rollout.play.request import sampling_seed
from tests.fixtures.playing import (
    both_histories,
    content,
    place_of,
    play_batches,
    plays,
    turn_bytes,
    turns_of,
)
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ABORTED


def jittered(seed: int) -> Any:
    """Random delays, which give every seed a different order of completion."""
    generator = random.Random(seed)
    return lambda number: generator.random() * 0.02


def turns(outputs: list[Any]) -> dict[tuple[int, int], bytes]:
    """Every turn's sample by episode and turn index."""
    return {place_of(sample): turn_bytes(sample) for sample in turns_of(*outputs)}


@both_histories
async def test_batches_are_the_same_bytes_in_any_order_of_completion_on_threads_and_in_processes(
    tmp_path: Path, history: str
) -> None:
    keys = {"turn_quota": "per_env", "history": history}
    runs = [
        await play_batches(
            tmp_path, 3, jittered(seed), env_backend=backend, env_workers=workers, **keys
        )
        for seed, (backend, workers) in enumerate([("inline", 1), ("inline", 4), ("process", 2)])
    ]
    threads, more_threads, processes = (content(*outputs) for outputs, _ in runs)
    assert threads == more_threads == processes


@pytest.mark.slow
async def test_faults_that_were_survived_leave_no_trace_in_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)

    def faulty(body: dict[str, Any], number: int) -> Any:
        return (
            ABORTED
            if number % 7 == 3
            else {"sorry": "busy"}
            if number % 11 == 5
            else plays(body, number)
        )

    keys = {"turn_quota": "per_env", "env_backend": "process"}
    smooth, _ = await play_batches(tmp_path, 3, jittered(1), **keys)
    game = {"raise_share": 0.1, "die_at": 2, "once": str(tmp_path / "died")}
    rough, faults = await play_batches(tmp_path, 3, jittered(2), faulty, **keys, env=game)
    assert all(
        faults.get(kind)
        for kind in ("turns_aborted", "bad_answer", "raised", "worker_died", "replayed")
    )
    assert content(*smooth) == content(*rough)


async def test_with_a_global_quota_every_turn_is_the_same_bytes_whichever_batch_it_falls_into(
    tmp_path: Path,
) -> None:
    runs = [
        turns(
            (await play_batches(tmp_path, 3, jittered(seed), env_backend=backend, env_workers=2))[0]
        )
        for seed, backend in enumerate(["inline", "inline", "process"])
    ]
    for other in runs[1:]:
        both = runs[0].keys() & other.keys()
        assert len(both) > 36, "most of the 72 turns are played in either run"
        assert all(runs[0][key] == other[key] for key in both)


async def test_under_deterministic_inference_every_turn_has_its_own_seed_the_same_in_every_run(
    tmp_path: Path,
) -> None:
    seeds: list[int] = []

    def plays_by_seed(body: dict[str, Any], number: int) -> str:
        seeds.append(body["sampling_params"]["sampling_seed"])
        return ("ACTION: left", "ACTION: right", "right")[seeds[-1] % 3]

    keys = {"turn_quota": "per_env", "sglang_enable_deterministic_inference": True}
    first, _ = await play_batches(tmp_path, 2, jittered(1), plays_by_seed, **keys)
    assert len(set(seeds)) == len(seeds) == 48
    second, _ = await play_batches(tmp_path, 2, jittered(2), plays_by_seed, **keys)
    assert sorted(seeds[:48]) == sorted(seeds[48:])
    assert content(*first) == content(*second)


def test_sampling_seeds_of_long_episodes_and_of_held_out_episodes_with_the_same_ids_differ(
    tmp_path: Path,
) -> None:
    source = EpisodeSource(rollout_args(tmp_path, sglang_enable_deterministic_inference=True))
    specs = [source.episode(0), source.episode(1), *source.eval_episodes()[:2]]
    seeds = [sampling_seed(0, spec, turn) for spec in specs for turn in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
