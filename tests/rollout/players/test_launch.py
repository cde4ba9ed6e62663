"""Players as a run starts them: new processes of this machine, and Ray actors on a real cluster of
two nodes."""

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import continuous
from rollout.errors import ConfigError, PlayerError
from rollout.players import manager, running
from rollout.players import process as launch
from rollout.players.process import _accept
from tests.fixtures.playing import (
    content,
    faults_in,
    no_gap_and_none_twice,
    places_of,
    play_batches,
    playing,
)
from tests.fixtures.ray_cluster import two_nodes
from tests.fixtures.trainer import TURNS, updated_engine
from tests.fixtures.warm_python import warm_players
from tests.rollout.test_determinism import jittered


@pytest.mark.slow
async def test_processes_of_this_machine_play_the_batches_of_one_process_and_end_with_it(
    tmp_path: Path,
) -> None:
    keys = {
        "turn_quota": "per_env",
        "env": {"max_length": 40},
        "env_backend": "process",
        "env_workers": 2,
    }
    alone, _ = await play_batches(tmp_path, 2, jittered(1), **keys)
    wide, _ = await play_batches(tmp_path, 2, jittered(2), rollout_processes=2, **keys)
    assert content(*alone) == content(*wide)


async def test_what_a_player_cannot_read_is_said_in_the_words_of_one_process(
    tmp_path: Path,
) -> None:
    """As on a node that lacks the checkpoint."""
    with warm_players():
        async with playing(tmp_path, rollout_processes=2) as run:
            players = await run.players()
            players._args.hf_checkpoint = "/nowhere/model"
            with pytest.raises(ConfigError, match="'/nowhere/model'"):
                await players.open(None)


async def test_whoever_does_not_show_the_token_is_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "HELLO_S", 0.2)
    token, connected = b"t" * 32, asyncio.get_running_loop().create_future()
    async with await asyncio.start_server(
        partial(_accept, token, connected), "127.0.0.1"
    ) as server:
        address = server.sockets[0].getsockname()
        strangers = [await asyncio.open_connection(*address) for _ in range(3)]
        strangers[1][1].write(b"x" * 32)
        strangers[2][1].close()
        _, friend = await asyncio.open_connection(*address)
        friend.write(token)
        connection = await connected
        assert connection.getpeername() == friend.get_extra_info("sockname")
        assert [await reader.read() for reader, _ in strangers[:2]] == [b"", b""]
        connection.close()


class ActorGoneError(Exception):
    """Ray's error of an actor that has ended."""


class FakeRay(SimpleNamespace):
    """A Ray whose actors end as `play` says."""

    def __init__(self, play: Any) -> None:
        actor, self.killed = SimpleNamespace(play=SimpleNamespace(remote=play)), list[Any]()
        super().__init__(
            util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
            exceptions=SimpleNamespace(RayActorError=ActorGoneError),
            remote=lambda **_: lambda kind: SimpleNamespace(remote=lambda: actor),
            kill=self.killed.append,
        )


WHERE = "\x1b[36mray::A.__init__()\x1b[39m (pid=7, ip=192.0.2.2, actor_id=cf35, repr=<A>)\n     ^^^^^^^^\n"
LACKS = f"The actor died in its creation task, {WHERE}RuntimeError: failed to import on the worker\n\n{WHERE}"
"""Ray's words, as version 2.49 tells of an actor whose import fails."""


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            ActorGoneError(f"{LACKS}ModuleNotFoundError: No module named 'orjson'"),
            "ModuleNotFoundError: No module named 'orjson' on 192.0.2.2; every node needs the "
            "same packages",
        ),
        (
            RuntimeError(f"{WHERE}TimeoutError: [Errno 110] Connection timed out"),
            "TimeoutError: [Errno 110] Connection timed out on 192.0.2.2",
        ),
    ],
)
async def test_why_an_actor_cannot_play_is_said_in_one_sentence(
    problem: Exception, said: str
) -> None:
    async def play(*_: Any) -> None:
        raise problem

    ray = FakeRay(play)
    with pytest.raises(PlayerError) as caught:
        await launch._launch_actor(ray, 3)
    assert str(caught.value) == f"rollout process 3 could not be started as a Ray actor: {said}"
    assert len(ray.killed) == 1


async def test_a_player_that_ends_before_it_has_connected_is_a_death_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(*_: Any) -> None:
        raise ActorGoneError("The actor died because its node has died. Node Id: 0ab1")

    problems = deque([OSError("too many processes"), None])
    original = launch.launch

    async def launched(number: int) -> launch.Launched:
        if number == 1 and problems:
            if (problem := problems.popleft()) is not None:
                raise problem
            return await launch._launch_actor(FakeRay(play), number)
        return await original(number)

    monkeypatch.setattr(manager, "launch", launched)
    monkeypatch.setattr(manager, "PAUSE_S", 0.0)
    with warm_players():
        (output,), _ = await play_batches(tmp_path, 1, jittered(1), rollout_processes=2)
    assert output.metrics["rollout/faults/player_died"] == 2 and not problems
    assert "its node has died" in caplog.text and "too many processes" in caplog.text


async def test_a_start_that_is_cancelled_leaves_neither_actor_nor_listener() -> None:
    async def play(*_: Any) -> None:
        await asyncio.Event().wait()

    ray, before = FakeRay(play), asyncio.all_tasks()
    starting = asyncio.create_task(launch._launch_actor(ray, 3))
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.sleep(0)
    assert len(ray.killed) == 1 and asyncio.all_tasks() <= before


@pytest.fixture
def cluster() -> Iterator[Any]:
    with two_nodes() as nodes:
        yield nodes


def remember_actors(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launched]:
    """The actors that are started from now on."""
    launched: list[launch.Launched] = []
    original = launch._launch_actor

    async def remember(*arguments: Any) -> launch.Launched:
        launched.append(await original(*arguments))
        return launched[-1]

    monkeypatch.setattr(launch, "_launch_actor", remember)
    return launched


@pytest.mark.slow
async def test_two_ray_actors_one_of_which_is_killed_play_the_batches_of_one_process(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has one CPU and each actor takes one, so they are on different nodes."""
    keys = {"turn_quota": "per_env", "env": {"max_length": 40}}
    alone, _ = await play_batches(tmp_path, 2, jittered(1), **keys)
    launched = remember_actors(monkeypatch)

    def killing(number: int) -> float:
        if number == 30:
            launched[0].end()
        return 0.005

    wide, faults = await play_batches(tmp_path, 2, killing, rollout_processes=2, **keys)
    assert content(*alone) == content(*wide)
    assert len(launched) == 3 and faults["player_died"] == 1


@pytest.mark.slow
async def test_continuous_batches_of_two_ray_actors_lose_no_turn_when_weights_come_and_one_actor_is_killed(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, outputs = remember_actors(monkeypatch), list[Any]()
    keys = {"rollout_processes": 2, "max_staleness": 1, "env": {"max_length": 40}}
    async with playing(tmp_path, updated_engine(), **keys) as run:
        await (await run.players()).start()
        for number in range(6):
            if number == 3:
                launched[1].end()
            outputs.append(await run.batch(number, continuous.collect))
            await asyncio.sleep(0.2)  # training
            run.engine.update()
    assert len(launched) == 3 and faults_in(outputs, "player_died") == 1
    assert faults_in(outputs, "episodes_failed") == 0
    assert [len(places_of(output)) for output in outputs] == [TURNS] * 6
    no_gap_and_none_twice(places_of(*outputs))
    ages = {output.metrics["turn/staleness_max"] for output in outputs}
    assert ages <= {0.0, 1.0} and 1.0 in ages, "turns are played while training runs"
    for process in (0, 1):
        assert (
            sum(
                output.metrics[f"rollout/process/{process}/engine_concurrency"]
                for output in outputs[:3]
            )
            > 0
        )


async def test_a_player_that_does_not_start_in_time_stops_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "START_S", 0.0)
    with warm_players():
        async with playing(tmp_path, rollout_processes=2) as run:
            players = await run.players()
            with pytest.raises(PlayerError, match="a rollout process has not started within 0 s"):
                await players.open(run.source.episode(0))
    assert players.faults["player_died"] == 0 and all(
        place.player is None for place in players._places
    )
