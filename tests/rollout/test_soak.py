"""A week in minutes: 256 slots, thousands of episodes, long ones among them, faults at 5 %, nothing
leaks or slows.

Two runs take turns, batch by batch, so that whatever else the machine does falls on both: one
without faults, one with. `SOAK_EPISODES` sets the size: 1,000 by default, 15,000 in the documented
run. A live episode holds its answers so far, so memory is compared from where every slot has played
as many turns as the longest episode has.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.data_source import EpisodeSource
from rollout.errors import EngineError
from rollout.fixed_turn import collect_or_draw
from rollout.play.engine import EngineClient
from rollout.play.parts import Runtime
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.workers.hosts import ProcessHost
from tests.fixtures.rollout_args import rollout_args

EPISODES = int(os.environ.get("SOAK_EPISODES", "1000"))
SLOTS, TURNS, LONGEST, WORKERS = 256, 8 * 256, 400, 2
SHARE = 0.05
"""Of the engine's answers: half fail, half are aborts. A tenth as many environment steps raise."""
LATENCY_S, BACKOFF_S, ABORT_PAUSE_S = 0.5, 0.1, 0.2
KILL_EVERY = 16
"""Batches after which a worker process of the faulty run is killed; that batch counts for leaks,
not for speed."""


class FaultyEngine(EngineClient):
    """Answers in this process after a fixed time; a share of the answers is an error or an
    abort."""

    def __init__(self, source: EngineClient, answer: list[int], share: float) -> None:
        super().__init__(source.url, source.settings)
        self.answer, self.share, self.random = answer, share, random.Random(0)

    async def _post(self, path: str, payload: Any, headers: Any) -> Any:
        await asyncio.sleep(LATENCY_S)
        draw = self.random.random()
        if draw < self.share / 2:
            raise EngineError("injected fault", "connection_lost")
        return {
            "text": "x",
            "meta_info": {
                "finish_reason": {"type": "abort" if draw < self.share else "stop"},
                "output_token_logprobs": [[-0.5, token, None] for token in self.answer],
                "completion_tokens": len(self.answer),
                "weight_version": "1",
            },
        }


def ideal_batch_s(share: float, generator: random.Random) -> float:
    """Seconds that a batch takes in a loop that costs nothing itself: only the engine, its faults
    and the pauses.

    Slots take the next turn of the budget as they become free; a failed answer takes as long as a
    good one; then comes the pause before the next attempt, except after a first abort. The batch
    ends with its last answer.
    """
    free = [0.0] * SLOTS
    for _ in range(TURNS):
        now, aborts = heapq.heappop(free) + LATENCY_S, 0
        while (draw := generator.random()) < share:
            if draw < share / 2:
                now += generator.uniform(BACKOFF_S / 2, BACKOFF_S) + LATENCY_S
            else:
                now += ABORT_PAUSE_S * (aborts > 0) + LATENCY_S
                aborts += 1
        heapq.heappush(free, now)
    return max(free)


def lost_s(replay_s: float) -> float:
    """The lost time of a batch: how much longer it takes that ideal loop with the faults than
    without, and replays.

    A worker that plays an episode again serves none of its others, so its slots lose that time: all
    slots together the seconds of all replays, shared by the workers.
    """
    generator = random.Random(0)
    with_faults = sum(ideal_batch_s(SHARE, generator) for _ in range(100)) / 100
    return with_faults - ideal_batch_s(0.0, generator) + replay_s / WORKERS


@dataclass
class Run:
    """One of the two runs: what plays it and what it has played."""

    args: Any
    source: EpisodeSource
    runtime: Runtime
    episodes: float = 0.0
    batches: int = 0

    @classmethod
    async def start(cls, folder: Path, share: float) -> Run:
        args = rollout_args(
            folder,
            rollout_batch_size=TURNS,
            global_batch_size=TURNS,
            n_env=SLOTS,
            env_backend="process",
            env_workers=WORKERS,
            max_episode_failures_per_batch=TURNS,
            max_turn_retries=1000,
            engine={"max_retries": 20, "backoff_s": BACKOFF_S, "backoff_max_s": BACKOFF_S},
            env={
                "length_of": "tests.fixtures.counting_env.mixed_length",
                "raise_share": share / 10,
            },
        )
        runtime = await get_runtime(args)
        runtime.engine = FaultyEngine(
            runtime.engine, runtime.encoder.tokenizer.encode("right<|im_end|>"), share
        )
        return cls(args, EpisodeSource(args), runtime)

    async def batch(self) -> float:
        """Play one batch; the wall seconds that it took."""
        began = time.perf_counter()
        output = await collect_or_draw(self.args, self.batches, self.source)
        seconds = time.perf_counter() - began
        self.episodes += output.metrics["rollout/episodes_finished"]
        self.batches += 1
        # Batches are freed in another thread, as in slime.
        await asyncio.to_thread(output.samples.clear)
        return seconds

    async def batch_with_a_killed_worker(self) -> None:
        host = self.runtime.pool.workers[self.batches % WORKERS].host
        assert isinstance(host, ProcessHost)
        playing = asyncio.create_task(self.batch())
        await asyncio.sleep(2 * LATENCY_S)
        host.process.kill()
        await playing

    @property
    def faults(self) -> dict[str, int]:
        return {**self.runtime.engine.faults, **self.runtime.pool.faults, **self.runtime.counters}


@dataclass(frozen=True)
class Mark:
    """What the process holds after a batch."""

    episodes: float
    turns: int
    live_turns: int
    """Turns of the episodes that go on, of both runs."""
    memory: int
    worker_memory: int
    descriptors: int
    tasks: int

    @classmethod
    async def now(cls, smooth: Run, faulty: Run) -> Mark:
        """Measured off the loop: walking the machine's processes alone blocks for longer than our
        code may."""
        return await asyncio.to_thread(cls._measure, smooth, faulty, len(asyncio.all_tasks()))

    @classmethod
    def _measure(cls, smooth: Run, faulty: Run, tasks: int) -> Mark:
        gc.collect()
        process = psutil.Process()
        slots = [
            slot
            for run in (smooth, faulty)
            for slot in run.source.slots
            if slot.episode is not None
        ]
        played = faulty.episodes, TURNS * faulty.batches, sum(slot.episode.index for slot in slots)
        children = sum(
            child.memory_info().rss for child in process.children() if child.status() != "zombie"
        )
        return cls(*played, process.memory_info().rss, children, process.num_fds(), tasks)


@pytest.fixture
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of the event loop's longest callback: of CPU, which is what blocks it whatever else
    runs, and of wall."""
    longest = [0.0, 0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began, wall = time.thread_time(), time.perf_counter()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began)
        longest[1] = max(longest[1], time.perf_counter() - wall)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    monkeypatch.setattr(asyncio.TimerHandle, "_run", timed)
    yield longest


@pytest.fixture
def no_records(caplog: pytest.LogCaptureFixture) -> None:
    """pytest keeps every record, and so the traceback of every fault with all that it holds."""
    caplog.set_level(logging.CRITICAL, "rollout")


@pytest.fixture
def replay_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which replays held their workers."""
    held = [0.0]
    call = ProcessHost.call

    async def timed(host: ProcessHost, method: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call(host, method, *arguments)
        finally:
            if method == "replay" and arguments[2]:
                held[0] += time.perf_counter() - began

    monkeypatch.setattr(ProcessHost, "call", timed)
    return held


@pytest.mark.slow
@pytest.mark.usefixtures("no_records")
async def test_thousands_of_episodes_with_faults_leak_nothing_block_nothing_and_lose_only_the_time_of_the_faults(
    tmp_path: Path, longest_callback: list[float], replay_s: list[float]
) -> None:
    smooth, faulty = await Run.start(tmp_path, 0.0), await Run.start(tmp_path, SHARE)
    marks, smooth_s, faulty_s, replayed_s, timed, began = [], 0.0, 0.0, 0.0, 0, time.process_time()
    while faulty.episodes < EPISODES:
        if faulty.batches % KILL_EVERY == 1:
            await smooth.batch()
            await faulty.batch_with_a_killed_worker()
        elif not marks:  # workers start, everything is encoded for the first time
            await smooth.batch()
            await faulty.batch()
        else:
            replay_s[0] = 0.0
            smooth_s, faulty_s, timed = (
                smooth_s + await smooth.batch(),
                faulty_s + await faulty.batch(),
                timed + 1,
            )
            replayed_s += replay_s[0]
        marks.append(await Mark.now(smooth, faulty))
        print(
            f"batch {faulty.batches}: {smooth_s:.1f} s and {faulty_s:.1f} s of {timed}, "
            f"{marks[-1]}",
            flush=True,
        )
    cpu_ms = 1000 * (time.process_time() - began) / (TURNS * (smooth.batches + faulty.batches))
    faults, played = faulty.faults, TURNS * faulty.batches
    await close_runtimes()

    steady = [mark for mark in marks if mark.turns >= LONGEST * SLOTS]
    warm, last = [*steady, marks[0]][0], marks[-1]
    lost = lost_s(replayed_s / timed)
    share = (smooth_s / timed) / (faulty_s / timed - lost)
    print(
        f"{faulty.episodes:.0f} episodes, {played} turns with {faults}\na batch takes "
        f"{smooth_s / timed:.3f} s without faults and {faulty_s / timed:.3f} s with them, of which "
        f"{lost:.3f} s are the faults' own ({replayed_s / timed:.3f} s of replays): {share:.1%} of "
        f"the throughput\nlongest callback {longest_callback[0] * 1000:.1f} ms of CPU "
        f"({longest_callback[1] * 1000:.1f} ms wall), {cpu_ms:.2f} ms of CPU a turn in this "
        f"process\n{'warm' if steady else 'never warm, so memory is not compared'}: {warm}\nat the "
        f"end: {last}"
    )
    assert sum(faults[kind] for kind in ("connection_lost", "turns_aborted")) > 0.04 * played
    assert (
        faults["raised"]
        and faults["worker_died"]
        and faults["replayed"]
        and not faults.get("replay_mismatch")
    )
    assert not steady or last.memory / warm.memory - 1 <= 0.05
    assert last.descriptors - warm.descriptors <= 2
    assert last.tasks <= 2 * SLOTS + 4, "more than the environments that are made ready ahead"
    assert longest_callback[0] < 0.05
    assert share >= 0.9, "survived faults cost more than the time that they take by themselves"
