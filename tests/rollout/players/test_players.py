"""Several rollout processes: the batches of one process, also when players are killed; faults
counted and bounded."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import continuous
from rollout.errors import PlayerError
from rollout.players import manager
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import (
    content,
    faults_in,
    no_gap_and_none_twice,
    places_of,
    play_saved,
    playing,
    plays,
    sample_bytes,
)
from tests.fixtures.rollout_args import COUNTING
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.trainer import updated_engine
from tests.fixtures.warm_python import warm_players

LONG = {"turn_quota": "per_env", "env": {"max_length": 40}}
TWO = {**LONG, "rollout_processes": 2}
NOTES = {"memory": {"kind": "notes", "every": 2, "budget": 2000, "keep": 1, "max_tokens": 24}}


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    with warm_players():
        yield


def killing(run: Any, kills: dict[int, int], pause: Any = lambda number: 0.005) -> None:
    """Kill player `kills[k]` when the engine gets request k."""

    def delay(number: int) -> float:
        if number in kills:
            asyncio.get_running_loop().create_task(run.kill(kills[number]))
        return pause(number)

    run.engine.delay = delay


@pytest.mark.parametrize("keys", [{"history": "full"}, NOTES], ids=["full", "notes"])
async def test_batches_whose_players_are_killed_are_those_of_one_process(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    runs, config = list[list[Any]](), tmp_path / "config.yaml"
    for processes in (1, 2):
        config.write_text(f"rollout_interaction_env_path: {COUNTING}\n")
        given = {**LONG, **keys, "rollout_processes": processes, "custom_config_path": str(config)}
        async with playing(tmp_path, **given) as run:
            # Players 1 and 0, so that no kill waits for a restart.
            killing(
                run, {17: 1, 40: 0} if processes > 1 else {}, lambda number: 0.005 * (number % 3)
            )
            outputs = [await run.batch(0)]
            config.write_text("max_observation_chars: 1\n")  # someone prepares the next run
            outputs.append(await run.batch(1))
            if processes > 1:
                await run.kill(1)  # between two batches; counted in the second
            runs.append([*outputs, await run.batch(2)])
    alone, killed = runs
    assert content(*alone) == content(*killed)
    assert all(("summary/turns" in output.metrics) == (keys is NOTES) for output in killed)
    assert faults_in(killed, "player_died") == 3
    assert faults_in(killed, "episodes_failed") == 0


async def test_the_episodes_of_a_killed_player_that_cannot_be_replayed_fail_and_are_counted(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, **{**TWO, "env": {"max_length": 40, "lie": True}}) as run:
        outputs = [await run.batch(0)]
        await run.kill(0)
        outputs.append(await run.batch(1))
    no_gap_and_none_twice(places_of(*outputs))
    assert len(places_of(*outputs)) == 48
    assert 1 <= outputs[1].metrics["rollout/faults/episodes_failed"] <= 2, (
        "the live episodes of one player of two"
    )


async def test_players_that_die_again_and_again_stop_the_batch_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_DEATHS", 2)
    async with playing(tmp_path, **TWO) as run:
        killing(run, dict.fromkeys(range(1000), 1), lambda number: 0.01)
        with pytest.raises(PlayerError, match="process 1 died 3 times"):
            await run.batch(0)


async def test_players_that_die_with_their_node_are_each_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_DEATHS", 1)
    async with playing(tmp_path, **{**TWO, "rollout_processes": 3}) as run:
        await run.batch(0)
        await asyncio.gather(*(run.kill(number) for number in range(3)))
        output = await run.batch(1)
    assert output.metrics["rollout/faults/player_died"] == 3


async def test_aborted_turns_are_retries_of_their_process_and_those_of_a_dead_one_are_counted(
    tmp_path: Path,
) -> None:
    def aborts(body: dict[str, Any], number: int) -> Any:
        return engine.answer("", body, "abort") if number % 7 == 3 else plays(body, number)

    engine = ScriptedEngine(chatml_tokenizer(), aborts)
    async with playing(tmp_path, engine, **TWO) as run:
        first = (await run.batch(0)).metrics
        killing(run, {36: 0}, lambda number: 0.5 if number == 36 else 0.005)
        second = (await run.batch(1)).metrics
    retries = sum(first[f"rollout/process/{number}/turns_retried"] for number in range(2))
    assert retries == first["rollout/turns_retried"] == first["rollout/faults/turns_aborted"] > 0
    assert second["rollout/faults/player_died"] == 1
    interrupted = second["rollout/faults/turns_interrupted"]
    assert 1 <= interrupted <= 4, "the turns in flight in one player, of four slots"
    assert second["rollout/turns_retried"] == interrupted + second["rollout/faults/turns_aborted"]


@pytest.mark.parametrize("processes", some([2, 4], [2]))
async def test_continuous_batches_lose_no_turn_when_players_are_killed(
    tmp_path: Path, processes: int
) -> None:
    keys = {"rollout_processes": processes, "turn_quota": "global", "max_staleness": 2}
    outputs: list[Any] = []
    async with playing(tmp_path, updated_engine(), **{**LONG, **keys}) as run:
        for number in range(4):
            if number:
                await run.kill(number % processes)
            outputs.append(await run.batch(number, continuous.collect))
            run.engine.update()
    no_gap_and_none_twice(places_of(*outputs))
    assert len(places_of(*outputs)) == 96
    assert max(output.metrics["turn/staleness_max"] for output in outputs) <= 2


async def test_a_run_is_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    whole, _ = await play_saved(tmp_path, 0, 4, **LONG)
    resumed, _ = await play_saved(tmp_path, 2, 4, **TWO)
    assert content(*whole[2:]) == content(*resumed)
    assert resumed[0].metrics["rollout/faults/episodes_lost_at_resume"] == 0


async def test_an_evaluation_has_the_results_of_one_process_although_a_player_is_killed(
    tmp_path: Path,
) -> None:
    results = []
    for processes in (1, 2):
        keys = {
            "rollout_processes": processes,
            "history": "full",
            "eval": {"episodes": 6, "max_turns": 8},
        }
        async with playing(tmp_path, **{**LONG, **keys}) as run:
            killing(run, {9: 1} if processes > 1 else {})
            output = await run.evaluation()
            runtime = await run.runtime()
            async with asyncio.timeout(60):  # the evaluation may end before the death is noticed
                while runtime.fault_counts()["player_died"] < processes - 1:
                    await asyncio.sleep(0.01)
            assert runtime.fault_counts()["player_died"] == processes - 1
        results.append((output.metrics, [sample_bytes(s) for s in output.data["count"]["samples"]]))
    assert results[0] == results[1]
