"""Processes that hang or are killed, again and again: no turn is lost or played twice, and memory stays flat.

`SOAK_MINUTES` sets the length: 2 by default, with a kill every ten seconds; 60 in the documented run, every minute.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from array import array
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import continuous, fixed_turn
from rollout.data_source import EpisodeSource
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.players import manager
from rollout.players.manager import PlayerProcesses
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import plays
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.warm_python import warm_players
from tests.rollout.players.test_players import Run, content
from tests.rollout.test_continuous import TURNS, Engine

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
EVERY_S = 60.0 if MINUTES >= 30 else 10.0
ROUNDS = 1000
"""Above the turns of any episode."""


async def test_a_player_that_hangs_is_ended_and_the_batch_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "HANG_S", 2.0)
    runs: list[Any] = []
    for processes in (1, 2):
        with warm_players():
            async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
                run = Run(tmp_path, engine, rollout_processes=processes)
                try:
                    if processes > 1:
                        players = (await run.runtime()).players
                        assert isinstance(players, PlayerProcesses)
                        os.kill((await players.start())[0], signal.SIGSTOP)
                    runs.append(await run.batch(0))
                finally:
                    await close_runtimes()
    alone, hung = runs
    assert content([alone]) == content([hung])
    assert hung.metrics["rollout/faults/player_died"] >= 1, "a loaded machine may stop the other one, too"
    assert hung.metrics["rollout/faults/episodes_failed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
async def test_whatever_is_killed_no_turn_is_lost_or_played_twice_and_memory_is_flat(tmp_path: Path) -> None:
    played, resident, killed = array("q"), [], {"player": 0, "environment worker": 0}
    chosen, here = random.Random(0), psutil.Process()
    async with Engine() as engine:
        workers = {"env_backend": "process", "env_workers": 4, "env": {"max_length": 40}}
        args = rollout_args(tmp_path, engine.port, rollout_processes=2, max_staleness=1, turn_quota="global", **workers)
        source = EpisodeSource(args)
        try:
            players = (await get_runtime(args)).players
            assert isinstance(players, PlayerProcesses)
            pids = await players.start()
            began = time.monotonic()
            kills = (began + EVERY_S * k for k in itertools.count(1))
            due = next(kills)
            for number in itertools.count():
                batch = asyncio.create_task(fixed_turn.collect_or_draw(args, number, source, continuous.collect))
                if time.monotonic() > due:
                    due = next(kills)
                    pids = await players.start()
                    kind = chosen.choice(list(killed))
                    inside = psutil.Process(chosen.choice(pids))
                    victims = [inside] if kind == "player" else inside.children(recursive=True)
                    chosen.choice(victims).kill()
                    killed[kind] += 1
                output = await batch
                await asyncio.sleep(0.2)  # training
                engine.update()
                # The scripted engine keeps what it was sent.
                engine.requests, engine.headers = [{}] * len(engine.requests), []
                turns = [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]
                assert len(turns) == TURNS
                played.extend(s.metadata["episode_id"] * ROUNDS + s.metadata["round_number"] for s in turns)
                assert output.metrics["rollout/faults/episodes_failed"] == 0
                resident.append(here.memory_info().rss)
                if time.monotonic() - began > 60 * MINUTES:
                    break
        finally:
            await close_runtimes()
    seen = set(played)
    assert len(seen) == len(played), "no turn is played twice"
    assert all(turn % ROUNDS == 0 or turn - 1 in seen for turn in seen), "no turn is lost"
    quarter = resident[len(resident) // 4]
    print(
        f"{MINUTES:g} min: {len(resident)} batches, {len(played)} turns; killed: {killed}; memory of the process that "
        f"keeps the batch: {quarter >> 20} MiB after a quarter, {resident[-1] >> 20} MiB at the end"
    )
    assert resident[-1] < 1.1 * quarter
    assert min(killed.values()) > 0
