"""A week in minutes: 256 slots, thousands of episodes, long ones among them, faults at 5 %, nothing leaks.

`SOAK_EPISODES` sets the size (default 1,000; the documented run is 10,000).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.data_source import EpisodeSource
from rollout.engine import EngineClient
from rollout.errors import EngineError
from rollout.runtime import close_runtimes, get_runtime
from rollout.warmup import collect_or_draw
from tests.fixtures.rollout_args import rollout_args

EPISODES = int(os.environ.get("SOAK_EPISODES", "1000"))
SLOTS = 256


def mixed_length(seed: int) -> int:
    """Mostly short episodes; one in fifty plays 400 turns."""
    return 400 if seed % 50 == 0 else 1 + random.Random(seed).randrange(12)


class FaultyEngine(EngineClient):
    """Answers in this process; a share of the requests fails first, through the client's own retry path."""

    def __init__(self, source: EngineClient, answer: list[int], share: float) -> None:
        super().__init__(source.url, source.config)
        self.answer, self.share, self.random = answer, share, random.Random(0)

    async def _post(self, path: str, payload: Any, headers: Any) -> Any:
        await asyncio.sleep(0.001)
        draw = self.random.random()
        if draw < self.share / 2:
            raise EngineError("injected fault") from ConnectionError()
        finish = "abort" if draw < self.share else "stop"
        entries = [[-0.5, token, None] for token in self.answer]
        return {
            "text": "x",
            "meta_info": {
                "finish_reason": {"type": finish},
                "output_token_logprobs": entries,
                "completion_tokens": len(entries),
                "weight_version": "1",
            },
        }


@pytest.fixture
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """CPU seconds of the event loop's longest single callback: what blocks it, whatever else the machine does."""
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    monkeypatch.setattr(asyncio.TimerHandle, "_run", timed)
    yield longest


async def play(folder: Path, episodes: int, share: float) -> dict[str, float]:
    """Batches until `episodes` have ended; resources at the first third and at the end."""
    turns = 8 * SLOTS
    args = rollout_args(
        folder,
        rollout_batch_size=turns,
        global_batch_size=turns,
        n_env=SLOTS,
        env_backend="process",
        env_workers=2,
        max_episode_failures_per_batch=turns,
        max_turn_retries=1000,
        engine={"max_retries": 20, "backoff_s": 0.001, "backoff_max_s": 0.01},
        env={"length_of": "tests.rollout.test_soak.mixed_length", "raise_share": share / 10},
    )
    runtime = await get_runtime(args)
    runtime.engine = FaultyEngine(runtime.engine, runtime.encoder.tokenizer.encode("right<|im_end|>"), share)
    source = EpisodeSource(args)
    process = psutil.Process()
    ended, batch, marks = 0.0, 0, []
    began = time.process_time()
    while ended < episodes:
        output = await collect_or_draw(args, batch, source)
        ended += output.metrics.get("episode/finished", 0.0)
        batch += 1
        del output
        await asyncio.to_thread(gc.collect)
        marks.append((ended, process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())))
    seconds = time.process_time() - began
    faults = dict(runtime.engine.faults) | dict(runtime.pool.faults) | dict(runtime.counters)
    await close_runtimes()
    warm = next(mark for mark in marks if mark[0] >= episodes / 3)
    return {
        "memory_growth": marks[-1][1] / warm[1] - 1,
        "fd_growth": marks[-1][2] - warm[2],
        "tasks": marks[-1][3],
        "cpu_s_per_turn": seconds / (batch * turns),
        "faults": float(sum(faults.values())),
        "turns": float(batch * turns),
    }


@pytest.mark.slow
async def test_thousands_of_episodes_with_faults_leak_nothing_and_never_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_callback: list[float]
) -> None:
    monkeypatch.setattr("rollout.episode.ABORT_PAUSE_S", 0.001)
    faulty = await play(tmp_path, EPISODES, 0.05)
    print(faulty, "longest callback", longest_callback[0])
    assert faulty["faults"] > 0.04 * faulty["turns"]
    assert faulty["memory_growth"] <= 0.05
    assert faulty["fd_growth"] <= 2
    assert faulty["tasks"] <= SLOTS + 4, "more than the environments that are made ready ahead"
    assert longest_callback[0] < 0.05
