"""Several rollout processes: the batches of one process, also when players are killed; faults counted and bounded."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import continuous, fixed_turn
from rollout.data_source import EpisodeSource
from rollout.errors import PlayerError
from rollout.evaluate import evaluate
from rollout.play.parts import Runtime
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.players import manager
from rollout.players.manager import MAX_DEATHS, PlayerProcesses
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import plays, sample_bytes
from tests.fixtures.rollout_args import COUNTING, rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.warm_python import warm_players
from tests.rollout.test_continuous import Engine, no_gap_and_none_twice
from tests.rollout.test_vlm_games import settings

LONG = {"turn_quota": "per_env", "env": {"max_length": 40}}
NOTES = {"memory": {"kind": "notes", "every": 2, "budget": 2000, "keep": 1, "max_tokens": 24}}


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    with warm_players():
        yield


class Run:
    """Batches of one run, whose players a test can kill while it plays."""

    def __init__(self, folder: Path, engine: ScriptedEngine | None = None, **keys: Any) -> None:
        self.args = rollout_args(folder, 1 if engine is None else engine.port, **{**LONG, **keys})
        self.source = EpisodeSource(self.args)

    async def batch(self, number: int, collect: Any = fixed_turn.collect) -> Any:
        return await fixed_turn.collect_or_draw(self.args, number, self.source, collect)

    async def runtime(self) -> Runtime:
        return await get_runtime(self.args)

    async def players(self) -> PlayerProcesses:
        players = (await self.runtime()).players
        assert isinstance(players, PlayerProcesses)
        return players

    async def kill(self, number: int) -> None:
        """End a player's process, once it runs, as the out-of-memory killer does; returns when its end is noticed."""
        place = (await self.players())._places[number]
        while (player := place.player) is None or (process := player.launched) is None:
            await asyncio.sleep(0.005)
        process.end()
        while not player.lost:
            await asyncio.sleep(0.005)


def content(outputs: list[Any]) -> list[bytes]:
    return [sample_bytes(sample) for output in outputs for group in output.samples for sample in group]


def turns_of(outputs: list[Any]) -> list[tuple[int, int]]:
    samples = [s for output in outputs for group in output.samples for s in group if s.metadata["kind"] == "turn"]
    return [(s.metadata["episode_id"], s.metadata["round_number"]) for s in samples]


@pytest.mark.parametrize("keys", [{"history": "window"}, {"history": "full"}, NOTES], ids=["window", "full", "notes"])
async def test_batches_whose_players_are_killed_are_those_of_one_process(tmp_path: Path, keys: dict[str, Any]) -> None:
    runs, config = list[list[Any]](), tmp_path / "config.yaml"
    for processes in (1, 2):
        async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
            config.write_text(f"rollout_interaction_env_path: {COUNTING}\n")
            run = Run(tmp_path, engine, rollout_processes=processes, custom_config_path=str(config), **keys)

            def killing(number: int, run: Run = run, processes: int = processes) -> float:
                if processes > 1 and number in (17, 40):  # players 1 and 0, so that no kill waits for a restart
                    config.write_text("max_observation_chars: 1\n")  # someone prepares the next run
                    asyncio.get_running_loop().create_task(run.kill(number % 2))
                return 0.005 * (number % 3)

            engine.delay = killing
            try:
                outputs = [await run.batch(0), await run.batch(1)]
                if processes > 1:
                    await run.kill(1)  # between two batches; counted in the second
                runs.append([*outputs, await run.batch(2)])
            finally:
                await close_runtimes()
    alone, killed = runs
    assert content(alone) == content(killed)
    assert all(("summary/turns" in output.metrics) == (keys is NOTES) for output in killed)
    assert sum(output.metrics["rollout/faults/player_died"] for output in killed) == 3
    assert all(output.metrics["rollout/faults/episodes_failed"] == 0 for output in killed)


async def test_continuous_batches_with_notes_are_resumed_and_survive_a_kill(tmp_path: Path) -> None:
    outputs: list[Any] = []
    for number in range(3):  # with 4 slots and a batch of 7, some slots stop between notes and the next turn
        async with Engine() as engine:
            load = {"load": str(tmp_path / "save")} if number else {}
            sizes = {"rollout_batch_size": 7, "global_batch_size": 7, "turn_quota": "global"}
            run = Run(tmp_path, engine, rollout_processes=2, max_staleness=1, **NOTES, **sizes, **load)
            if number:
                run.source.load(number - 1)

            def killing(request: int, run: Run = run) -> float:
                if request == 5:
                    asyncio.get_running_loop().create_task(run.kill(0))
                return 0.005

            engine.delay = killing
            try:
                outputs.append(await run.batch(number, continuous.collect))
                run.source.save(number)
            finally:
                await close_runtimes()
    assert all(output.metrics["rollout/faults/episodes_failed"] == 0 for output in outputs)
    assert all(output.metrics["rollout/faults/episodes_lost_at_resume"] == 0 for output in outputs)
    no_gap_and_none_twice(turns_of(outputs))
    assert len(turns_of(outputs)) == 21
    samples = [s for output in outputs for group in output.samples for s in group if s.metadata["kind"] == "turn"]
    notes = [s.metadata["round_number"] for s in samples if "summary" in s.metadata]
    assert notes and all(number % 3 == 2 for number in notes)


async def test_the_episodes_of_a_killed_player_that_cannot_be_replayed_fail_and_are_counted(tmp_path: Path) -> None:
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        run = Run(tmp_path, engine, rollout_processes=2, env={"max_length": 40, "lie": True})
        try:
            outputs = [await run.batch(0)]
            await run.kill(0)
            outputs.append(await run.batch(1))
        finally:
            await close_runtimes()
    no_gap_and_none_twice(turns_of(outputs))
    assert len(turns_of(outputs)) == 48
    assert 1 <= outputs[1].metrics["rollout/faults/episodes_failed"] <= 2, "the live episodes of one player of two"


async def test_players_that_die_again_and_again_stop_the_batch_with_one_sentence(tmp_path: Path) -> None:
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        run = Run(tmp_path, engine, rollout_processes=2)

        def killing(number: int) -> float:
            asyncio.get_running_loop().create_task(run.kill(1))
            return 0.01

        engine.delay = killing
        try:
            with pytest.raises(PlayerError, match=rf"process 1 died {MAX_DEATHS + 1} times.*lower rollout_processes"):
                await run.batch(0)
        finally:
            await close_runtimes()


async def test_players_that_die_with_their_node_are_each_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_DEATHS", 1)
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        run = Run(tmp_path, engine, rollout_processes=3)
        try:
            await run.batch(0)
            await asyncio.gather(*(run.kill(number) for number in range(3)))
            output = await run.batch(1)
        finally:
            await close_runtimes()
    assert output.metrics["rollout/faults/player_died"] == 3


async def test_a_batch_counts_its_own_part_of_the_requests_in_flight(tmp_path: Path) -> None:
    """One answer takes as long as several batches of the other slot."""
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        engine.delay = lambda number: 3.0 if number == 3 else 0.1
        sizes = {"rollout_batch_size": 4, "global_batch_size": 4, "turn_quota": "global", "n_env": 2}
        run, metrics = Run(tmp_path, engine, rollout_processes=2, max_staleness=3, **sizes), list[dict[str, float]]()
        try:
            for number in range(6):
                engine.version = str(number + 1)
                metrics.append((await run.batch(number, continuous.collect)).metrics)
        finally:
            await close_runtimes()
    for batch in metrics:
        most = 1 + 0.4 * batch["rollout/turns_per_s"] / 4  # the processes are not read in the same moment
        assert batch["rollout/engine_busy_share"] < most
        assert batch["rollout/engine_concurrency"] < 2 * most, "there are two slots"
    assert any(batch["rollout/engine_concurrency"] > 1.5 for batch in metrics[1:3]), "the slow answer is in flight"


async def test_aborted_turns_are_retries_of_their_process_and_those_of_a_dead_one_are_counted(tmp_path: Path) -> None:
    def aborts(body: dict[str, Any], number: int) -> Any:
        return engine.answer("", body, "abort") if number % 7 == 3 else plays(body, number)

    async with ScriptedEngine(chatml_tokenizer(), aborts) as engine:
        run = Run(tmp_path, engine, rollout_processes=2)
        try:
            first = (await run.batch(0)).metrics
            engine.delay = lambda number: (
                0.005 if number != 36 else asyncio.get_running_loop().create_task(run.kill(0)) and 0.5
            )
            second = (await run.batch(1)).metrics
        finally:
            await close_runtimes()
    retries = sum(first[f"rollout/process/{number}/turns_retried"] for number in range(2))
    assert retries == first["rollout/turns_retried"] == first["rollout/faults/turns_aborted"] > 0
    assert second["rollout/faults/player_died"] == 1
    interrupted = second["rollout/faults/turns_interrupted"]
    assert 1 <= interrupted <= 4, "the turns in flight in one player, of four slots"
    assert second["rollout/turns_retried"] == interrupted + second["rollout/faults/turns_aborted"]


@pytest.mark.parametrize("processes", some([2, 4], [2]))
async def test_continuous_batches_lose_no_turn_when_players_are_killed(tmp_path: Path, processes: int) -> None:
    async with Engine() as engine:
        run = Run(tmp_path, engine, rollout_processes=processes, turn_quota="global", max_staleness=2)
        outputs: list[Any] = []
        try:
            for number in range(4):
                if number:
                    await run.kill(number % processes)
                outputs.append(await run.batch(number, continuous.collect))
                engine.update()
        finally:
            await close_runtimes()
    no_gap_and_none_twice(turns_of(outputs))
    assert len(turns_of(outputs)) == 96
    assert max(output.metrics["turn/staleness_max"] for output in outputs) <= 2


async def test_a_run_is_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    whole: list[Any] = []
    for load, batches, processes in ((None, range(4), 1), (1, range(2, 4), 2)):
        async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
            folder = {"load": str(tmp_path / "save")} if load is not None else {}
            run = Run(tmp_path, engine, rollout_processes=processes, **folder)
            if load is not None:
                run.source.load(load)
            outputs: list[Any] = []
            try:
                for number in batches:
                    engine.version = str(number + 1)
                    outputs.append(await run.batch(number))
                    run.source.save(number)
            finally:
                await close_runtimes()
            whole.append(outputs)
    assert content(whole[0][2:]) == content(whole[1])
    assert whole[1][0].metrics["rollout/faults/episodes_lost_at_resume"] == 0


async def test_an_evaluation_has_the_results_of_one_process_although_a_player_is_killed(tmp_path: Path) -> None:
    results = []
    for processes in (1, 2):
        async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
            evaluation = {"episodes": 6, "max_turns": 8}
            run = Run(tmp_path, engine, rollout_processes=processes, history="full", eval=evaluation)

            def killing(number: int, run: Run = run, processes: int = processes) -> float:
                if processes > 1 and number == 9:
                    asyncio.get_running_loop().create_task(run.kill(1))
                return 0.005

            engine.delay = killing
            try:
                output = await evaluate(run.args, run.source)
                runtime = await run.runtime()
                async with asyncio.timeout(60):  # the evaluation may end before the death is noticed
                    while runtime.fault_counts()["player_died"] < processes - 1:
                        await asyncio.sleep(0.01)
                assert runtime.fault_counts()["player_died"] == processes - 1
            finally:
                await close_runtimes()
        results.append((output.metrics, [sample_bytes(s) for s in output.data["count"]["samples"]]))
    assert results[0] == results[1]


@pytest.mark.parametrize("history", some(["full", "window"], ["full"]))
async def test_pictures_arrive_as_in_one_process(tmp_path: Path, history: str) -> None:
    batches = []
    for processes in (1, 2):
        async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "right") as engine:
            game = settings(tmp_path, "envs.babaisai", True, history=history, n_env=2)
            sizes = {"rollout_batch_size": 6, "global_batch_size": 6}
            run = Run(tmp_path, engine, rollout_processes=processes, **{**game, **sizes})
            try:
                batches.append(content([await run.batch(0)]))
            finally:
                await close_runtimes()
    assert batches[0] == batches[1]
    assert all(b"pixel_values" in sample for sample in batches[0])
