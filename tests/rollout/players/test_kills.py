"""Processes that hang or are killed, again and again: no turn is lost or played twice, and memory
stays flat.

`SOAK_MINUTES` sets the length: 2 by default, with a kill every 15 seconds; 60 in the documented
run, every minute.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from array import array
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import continuous
from rollout.play.runtime import close_runtimes
from rollout.players import running
from rollout.players.manager import PlayerProcesses
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import Run, content, places_of, playing, plays
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.trainer import TURNS, updated_engine
from tests.fixtures.warm_python import CONTEXT, warm_players
from tests.rollout.players.test_players import LONG

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
EVERY_S = 60.0 if MINUTES >= 30 else 15.0
ROUNDS = 1000
"""Above the turns of any episode."""
RESTART_S = 3.0
"""Seconds from the end of the engine to its restart."""


FAULTS = (
    "episodes_failed",
    "player_died",
    "env_worker_died",
    "engine_connection_lost",
    "engine_refused",
)


class ServedEngine(ScriptedEngine):
    """Reads its weights' version from another process, and forgets what it was sent."""

    def __init__(self, version: Any) -> None:
        self._pushed = version
        super().__init__(chatml_tokenizer(), self.play, "abort")

    version = property(lambda self: str(self._pushed.value), lambda self, value: None)  # type: ignore[assignment]

    def play(self, body: dict[str, Any], number: int) -> str:
        self.requests[number] = {}
        self.headers.clear()
        return plays(body, number)


async def serve(version: Any, port: int, started: Any) -> None:
    engine, plain = ServedEngine(version), updated_engine()
    engine.fixed_port, engine.delay = port, plain.delay
    async with engine:
        started.send(engine.port)
        await asyncio.Event().wait()


class EngineProcess:
    """An engine in its own process. It is restarted on its address, as under slime's fault
    tolerance."""

    def __init__(self) -> None:
        self.version, self.port = CONTEXT.Value("q", 1), 0

    def start(self) -> None:
        ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=_serve, args=(self.version, self.port, theirs), daemon=True
        )
        self.process.start()
        self.port = ours.recv()

    def update(self) -> None:
        self.version.value += 1

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.sleep(RESTART_S)
        await asyncio.to_thread(self.start)


def _serve(version: Any, port: int, started: Any) -> None:
    asyncio.run(serve(version, port, started))


class Killer:
    """Kills a player, an environment worker and the engine in turn; the first player lives as long
    as the run."""

    def __init__(self, engine: EngineProcess, players: PlayerProcesses) -> None:
        self.engine, self.players, self.killed = engine, players, Counter[str]()
        self._chosen = random.Random(0)

    async def run(self) -> None:
        for kind in itertools.cycle(("player", "engine", "environment worker")):
            await asyncio.sleep(EVERY_S)
            pids = await self.players.start()
            if kind == "engine":
                await self.engine.kill()
            elif kind == "player":
                psutil.Process(self._chosen.choice(pids[1:])).kill()
            else:
                self._chosen.choice(
                    psutil.Process(self._chosen.choice(pids)).children(recursive=True)
                ).kill()
            self.killed[kind] += 1


class Memory:
    """Resident memory of this process and of the players, after each batch."""

    def __init__(self, players: PlayerProcesses) -> None:
        self._players, self._here = players, psutil.Process()
        self.manager, self.files, self.player = array("q"), array("q"), array("q")
        self.latest: dict[int, int] = {}
        """By process id: of a player that was killed, before its end."""

    def measure(self) -> None:
        self.manager.append(self._here.memory_info().rss)
        self.files.append(self._here.num_fds())
        pids = [place.pid for place in self._players._places]
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                self.latest[pid] = psutil.Process(pid).memory_info().rss
        self.player.append(self.latest[pids[0]])

    def check(self) -> None:
        """Compare a quarter of the way with the end; successors of killed players need no more than
        the first."""
        quarter, most = len(self.manager) // 4, max(self.latest.values())
        mib = [
            kept[number] >> 20 for kept in (self.manager, self.player) for number in (quarter, -1)
        ]
        print("manager: {} to {} MiB, first player: {} to {} MiB,".format(*mib), end=" ")
        print(
            f"{len(self.latest)} players: at most {most >> 20} MiB; {self.files[quarter]} to "
            f"{self.files[-1]} files"
        )
        assert self.manager[-1] < 1.1 * self.manager[quarter]
        assert self.player[-1] < 1.1 * self.player[quarter] and most < 1.1 * self.player[quarter]
        assert self.files[-1] <= self.files[quarter] + 16


@pytest.mark.slow
async def test_a_player_that_hangs_is_ended_and_the_batch_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "HANG_S", 2.0)
    runs: list[Any] = []
    for processes in (1, 2):
        with warm_players():
            async with playing(tmp_path, **LONG, rollout_processes=processes) as run:
                if processes > 1:
                    os.kill((await (await run.players()).start())[0], signal.SIGSTOP)
                runs.append(await run.batch(0))
    alone, hung = runs
    assert content(alone) == content(hung)
    assert hung.metrics["rollout/faults/player_died"] >= 1, (
        "a loaded machine may stop the other one, too"
    )
    assert hung.metrics["rollout/faults/episodes_failed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
async def test_whatever_is_killed_no_turn_is_lost_or_played_twice_and_memory_is_flat(
    tmp_path: Path,
) -> None:
    played, engine = array("q"), EngineProcess()
    engine.start()
    keys: dict[str, Any] = {"env_backend": "process", "env_workers": 4, "env": {"max_length": 40}}
    keys["engine"] = {
        "timeout_s": 60.0,
        "max_retries": 100,
        "backoff_s": 0.05,
        "backoff_max_s": 0.5,
    }
    keys |= {
        "sglang_router_port": engine.port,
        "rollout_processes": 2,
        "max_staleness": 1,
        "turn_quota": "global",
    }
    run, faults = Run(tmp_path, **keys), Counter[str]()
    try:
        players = await run.players()
        await players.start()
        killer, memory, began = Killer(engine, players), Memory(players), time.monotonic()
        killing = asyncio.create_task(killer.run())
        for number in itertools.count():
            output = await run.batch(number, continuous.collect)
            await asyncio.sleep(0.2)  # training
            engine.update()
            places = places_of(output)
            assert len(places) == TURNS
            played.extend(episode * ROUNDS + turn for episode, turn in places)
            faults.update({name: int(output.metrics[f"rollout/faults/{name}"]) for name in FAULTS})
            memory.measure()
            if killing.done() or time.monotonic() - began > 60 * MINUTES:
                break
        assert not killing.done(), killing.exception()
        killing.cancel()
    finally:
        await close_runtimes()
        engine.process.kill()
    print(
        f"{MINUTES:g} min: {number + 1} batches, {len(played)} turns; killed: {killer.killed}; "
        f"faults: {faults}"
    )
    seen = set(played)
    assert len(seen) == len(played), "no turn is played twice"
    assert all(turn % ROUNDS == 0 or turn - 1 in seen for turn in seen), "no turn is lost"
    assert faults["episodes_failed"] == 0 and min(killer.killed.values()) > 0
    assert faults["player_died"] >= killer.killed["player"] - 1
    # A request is in flight when an engine dies, or is sent before it is back.
    assert faults["engine_connection_lost"] + faults["engine_refused"] > 0
    memory.check()
