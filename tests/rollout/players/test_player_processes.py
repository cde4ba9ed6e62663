"""The processes of the players: their load and faults, how many there are, and how they start and end."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout import continuous
from rollout.bridge.checks import process_count
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, PlayerError
from rollout.play.runtime import close_runtimes
from rollout.players import manager
from rollout.players.process import Launched, Report, launch
from rollout.players.running import RunningPlayer
from rollout.workers.utilization import UNUSED, ProcessUsage
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import Run, content, flat, no_gap_and_none_twice, places_of, playing, plays
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
async def test_a_response_that_spans_an_update_is_asked_again_and_never_stepped(tmp_path: Path, processes: int) -> None:
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


NAMED = """
from enum import Enum, StrEnum
from tests.fixtures import counting_env


class Move(StrEnum):
    LEFT = "left"


class Metric(str, Enum):
    MADE = "made"


class Game(counting_env.CountingGame):
    def step(self, response_text):
        observation, done, info = super().step(response_text)
        named = {"executed_action": Move.LEFT, "action": Move.LEFT, "metrics": {Metric.MADE: 1}}
        return observation, done, {**info, **named}


def build_env(sample, args):
    env = counting_env.build_env(sample, args)
    env.__class__ = Game
    return env
"""


async def test_text_of_a_class_of_the_environments_file_crosses_processes_as_text(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(NAMED)
    runs: list[Any] = []
    for keys in ({"rollout_processes": 2}, {"env_backend": "process"}, {}):  # the last loads the file here
        game = {**LONG, "rollout_interaction_env_path": str(tmp_path / "game.py")}
        async with playing(tmp_path, **game, **keys) as run:
            runs.append(await run.batch(0))
        assert runs[-1].metrics["rollout/faults/player_died"] == 0
    assert content(runs[0]) == content(runs[1]) == content(runs[2])


async def test_the_engines_time_of_a_turn_has_no_start_of_a_player_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, pause_s = manager.launch, 0.0

    async def slow(number: int) -> Launched:
        await asyncio.sleep(pause_s)
        return await original(number)

    monkeypatch.setattr(manager, "launch", slow)
    async with playing(tmp_path, **TWO) as run:
        await run.batch(0)
        pause_s = 3.0
        await run.kill(1)
        output = await run.batch(1)
    assert output.metrics["rollout/faults/player_died"] == 1 and output.metrics["turn/engine_s_max"] < pause_s


def start_no_process(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any, Any], None]) -> None:
    """Players count as started without a process; `act` gets each of them and its slime `args`."""

    async def started(self: Any, launched: Any, args: Any) -> tuple[str, int]:
        act(self, args)
        return "node", 7

    async def launched(number: int) -> Any:
        return None

    monkeypatch.setattr(manager, "launch", launched)
    monkeypatch.setattr(RunningPlayer, "start", started)


async def test_what_a_player_uses_counts_from_when_it_can_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Report(Counter(), ProcessUsage(UNUSED.engine, UNUSED.env, 30.0, 0))
    start_no_process(monkeypatch, lambda player, args: player._report(imports))
    players = await Run(tmp_path, **TWO).players()
    await players.start()
    assert [used.cpu_s for used in players.usage()] == [0.0, 0.0]
    await close_runtimes()


@pytest.mark.parametrize(("workers", "processes"), [(7, 3), (1, 4)])
async def test_the_players_share_the_environment_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, processes: int
) -> None:
    shares: list[int] = []
    start_no_process(monkeypatch, lambda player, args: shares.append(args.env_workers))
    players = await Run(tmp_path, rollout_processes=processes, env_workers=workers, n_env=16).players()
    await players.start()
    await close_runtimes()
    assert sum(shares) == max(workers, processes) and max(shares) - min(shares) <= 1


class Launches(list[Launched]):
    """Counts the players that are started; after `stop_at` of them, `reached` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
        self.reached = asyncio.Event()

        async def launching(number: int) -> Launched:
            self.append(await launch(number))
            if len(self) == stop_at:
                self.reached.set()
            return self[-1]

        monkeypatch.setattr(manager, "launch", launching)


async def test_an_episode_that_is_opened_while_the_run_ends_starts_no_other_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch, stop_at=1)
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


async def test_a_start_that_is_cancelled_is_no_death_and_leaves_the_reason_why_players_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch, stop_at=1)
    players = await Run(tmp_path, **TWO).players()
    starting = asyncio.create_task(players.live(players._places[0]))
    await launches.reached.wait()
    for _ in range(5):
        await asyncio.sleep(0)  # connected, and building its runtime
    players._broken = reason = ConfigError("no tokenizer")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConfigError, match="no tokenizer"):
        await players.live(players._places[1])
    await close_runtimes()
    assert players._broken is reason and players.faults["player_died"] == 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"rollout_processes": 5, "rollout_function_path": "rollout.fixed_turn.generate_rollout"},
            "rollout_processes: 5 is more than n_env: 4",
        ),
        (
            {"rollout_processes": 2, "custom_generate_function_path": "rollout.generate.generate"},
            "rollout_processes: 2 is for fixed-turn and continuous batches",
        ),
    ],
)
def test_numbers_of_processes_that_cannot_work_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
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
def test_auto_means_one_process_per_four_engines(tmp_path: Path, flags: dict[str, Any], count: int) -> None:
    args = rollout_args(tmp_path, **{"rollout_processes": "auto", "n_env": 64, **flags})
    assert process_count(args, EpisodeSource(args).settings) == count
