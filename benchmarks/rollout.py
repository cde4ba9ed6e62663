"""What the rollout costs beside engine and environment, and how well it keeps an engine busy.

Two tables from one run:
1. host time per turn: an engine that answers at once, an environment that steps at once, one core;
2. useful engine time: a simulated engine (fixed time a turn, limited concurrency) under fixed-turn batches, and
   under an outer loop that waits for whole episodes and throws away what is over, on the same episode lengths.

    python benchmarks/rollout.py [--turns 2048] [--slots 128]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollout.data_source import EpisodeSource
from rollout.engine import EngineClient
from rollout.fixed_turn import collect
from rollout.runtime import close_runtimes, get_runtime
from rollout.turn import Generation
from tests.fixtures.rollout_args import rollout_args


def crafter_like_length(seed: int) -> int:
    """Episode lengths as Verlog reports them for Crafter: 70 to 400 turns, about 190 on average."""
    return min(400, max(70, round(random.Random(seed).lognormvariate(5.15, 0.42))))


class InstantEngine(EngineClient):
    """Answers in this process; `turn_s` and `places` simulate an engine that is slow and has limited room."""

    def __init__(self, source: EngineClient, answer: list[int], turn_s: float, places: int) -> None:
        super().__init__(source.url, source.config)
        self.answer, self.turn_s, self.places = answer, turn_s, asyncio.Semaphore(places)

    async def generate(self, prompt: Any, params: Any, **kwargs: Any) -> Generation:
        self.load.change(+1)
        try:
            async with self.places:
                if self.turn_s:
                    await asyncio.sleep(self.turn_s)
        finally:
            self.load.change(-1)
        meta = {"finish_reason": {"type": "stop"}}
        return Generation(self.answer, [-0.5] * len(self.answer), "", "stop", ("1",), meta)


async def prepare(folder: Path, slots: int, turns: int, turn_s: float, **keys: Any) -> tuple[Any, EpisodeSource]:
    args = rollout_args(
        folder,
        rollout_batch_size=turns,
        global_batch_size=turns,
        n_env=slots,
        env_backend="inline",
        env_workers=1,
        rollout_max_context_len=None,
        env={"length_of": "benchmarks.rollout.crafter_like_length", "preset": "verlog"},
        **keys,
    )
    runtime = await get_runtime(args)
    answer = runtime.encoder.tokenizer.encode("THINK: the tree is near.\nACTION: left<|im_end|>")
    runtime.engine = InstantEngine(runtime.engine, answer, turn_s, slots)
    return args, EpisodeSource(args)


async def host_time(folder: Path, turns: int) -> dict[str, float]:
    args, source = await prepare(folder, 32, turns, 0.0)
    await collect(args, 0, source)
    before = resource.getrusage(resource.RUSAGE_SELF)
    segments, _ = await collect(args, 1, source)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    env = sum(turn.env_s for segment in segments for turn in segment.turns)
    await close_runtimes()
    return {"host ms a turn (CPU, environment included)": 1e3 * cpu / turns, "of it environment": 1e3 * env / turns}


async def fixed_turn_busy(folder: Path, slots: int, turns: int, turn_s: float) -> float:
    args, source = await prepare(folder, slots, turns, turn_s)
    await collect(args, 0, source)
    began = time.perf_counter()
    batches = 2
    for k in range(1, 1 + batches):
        await collect(args, k, source)
    ideal = batches * turns * turn_s / slots
    busy = ideal / (time.perf_counter() - began)
    await close_runtimes()
    return busy


def episode_loop_busy(slots: int, turns: int) -> float:
    """The same turns from whole episodes: `slots` start together, and the batch waits for the longest.

    Computed, not slept: the outer loop issues one episode a slot, waits for all, and trains on them.
    """
    lengths = [crafter_like_length(seed) for seed in range(20 * slots)]
    shares = []
    for k in range(20):
        batch = lengths[k * slots : (k + 1) * slots]
        shares.append(sum(batch) / (slots * max(batch)))
    return statistics.mean(shares)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--turn-s", type=float, default=0.5, help="simulated engine time of one turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for key, value in (await host_time(Path(name), options.turns)).items():
            print(f"{key:<50}{value:8.3f}")
        busy = await fixed_turn_busy(Path(name), options.slots, options.turns, options.turn_s)
    loop = episode_loop_busy(options.slots, options.turns)
    print(f"{'useful engine time, fixed-turn batches':<50}{busy:8.1%}")
    print(f"{'useful engine time, waiting for whole episodes':<50}{loop:8.1%}")
    print(f"{'ratio':<50}{busy / loop:8.2f}")


if __name__ == "__main__":
    asyncio.run(main())
