"""The processes of the players: their load and faults, how many there are, and how they start and
end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout import continuous
from rollout.bridge.checks import process_count
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, PlayerError
from rollout.play.runtime import close_runtimes
from rollout.players import manager
from rollout.players.process import Launched, launch
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import Run, flat, no_gap_and_none_twice, places_of, playing, plays
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.players.test_players import LONG, TWO, warm  # noqa: F401  (warm is a fixture)


async def test_faults_in_the_players_are_counted_as_in_one_process(tmp_path: Path) -> None:
    def faulty(body: dict[str, Any], number: int) -> Any:
        return {"sorry": "busy"} if number % 11 == 5 else plays(body, number)

    async with playing(
        tmp_path, faulty, **{**TWO, "env": {"max_length": 40, "raise_at": 2, "raise_seeds": [1]}}
    ) as run:
        metrics = (await run.batch(0)).metrics
    expected = sum(number % 11 == 5 for number in range(len(run.engine.requests)))
    assert metrics["rollout/faults/engine_bad_answer"] == expected > 0
    assert metrics["rollout/faults/episodes_failed"] == 1
    assert metrics["rollout/turns_retried"] >= expected
    assert metrics["rollout/engine_concurrency"] > 0 and metrics["turn/host_s"] > 0
    shares = [metrics[f"rollout/process/{number}/engine_concurrency"] for number in range(2)]
    assert metrics["rollout/engine_concurrency"] == pytest.approx(sum(shares))


@pytest.mark.parametrize("processes", some([1, 2], [2]))
async def test_a_response_that_spans_an_update_is_asked_again_and_never_stepped(
    tmp_path: Path, processes: int
) -> None:
    def spanning(body: dict[str, Any], number: int) -> Any:
        answer = engine.answer(plays(body, number), body)
        if number % 5 == 3:
            answer["meta_info"]["weight_versions"] = ["0", "1"]
        return answer

    engine = ScriptedEngine(chatml_tokenizer(), spanning)
    keys = {**LONG, "rollout_processes": processes, "max_staleness": 1, "turn_quota": "global"}
    async with playing(tmp_path, engine, **keys) as run:
        output = await run.batch(0, continuous.collect)
    no_gap_and_none_twice(places_of(output))
    assert output.metrics["rollout/faults/turns_spanning_update"] > 0
    assert {v for sample in flat(output) for v in sample.weight_versions} == {"1"}


async def test_an_episode_that_is_opened_while_the_run_ends_starts_no_other_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launched] = []

    async def launching(number: int) -> Launched:
        launches.append(await launch(number))
        return launches[-1]

    monkeypatch.setattr(manager, "launch", launching)
    run = Run(tmp_path, **TWO)
    players = await run.players()
    await players.live(players._places[0])
    opening = [asyncio.create_task(players.open(run.source.episode(k))) for k in range(2)]
    await asyncio.sleep(0)  # one in the player that runs, one in the player that is being started
    await close_runtimes()
    for task in opening:
        with pytest.raises(PlayerError, match="the run has ended"):
            await task
    assert len(launches) == 2 and players.faults["player_died"] == 0
    assert all(place.player is None or place.player.lost for place in players._places)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {
                "rollout_processes": 5,
                "rollout_function_path": "rollout.fixed_turn.generate_rollout",
            },
            "rollout_processes: 5 is more than n_env: 4",
        ),
        (
            {"rollout_processes": 2, "custom_generate_function_path": "rollout.generate.generate"},
            "rollout_processes: 2 is for fixed-turn and continuous batches",
        ),
    ],
)
def test_numbers_of_processes_that_cannot_work_are_refused(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        EpisodeSource(rollout_args(tmp_path, **keys))


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ({}, 1),
        ({"rollout_num_gpus": 64, "rollout_num_gpus_per_engine": 4}, 4),
        ({"rollout_num_engines": 5, "rollout_num_gpus": 40}, 2),
        ({"rollout_num_gpus": 64, "n_env": 3}, 3),
        ({"rollout_num_gpus": 64, "custom_generate_function_path": "rollout.generate.generate"}, 1),
    ],
)
def test_auto_means_one_process_per_four_engines(
    tmp_path: Path, flags: dict[str, Any], count: int
) -> None:
    args = rollout_args(tmp_path, **{"rollout_processes": "auto", "n_env": 64, **flags})
    assert process_count(args, EpisodeSource(args).settings) == count
