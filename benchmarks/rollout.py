"""CPU cost of the rollout per turn, and how busy it keeps an engine.

Two tables:
1. CPU time of this process per turn. Environment and engine respond at once; the engine runs in this process, or in
   another one over HTTP.
2. Useful engine time. A simulated engine (fixed time per turn, fixed number of places) serves fixed-turn batches, and
   a loop that waits for whole episodes of the same lengths. With as many slots as places, a place is idle while the
   host works on its answer; a third more slots avoid that.

    python benchmarks/rollout.py [--turns 2048] [--places 96]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
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
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.turn import FinishReason, Generation
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine

ANSWER = "THINK: the tree is near.\nACTION: left"


def crafter_like_length(seed: int) -> int:
    """An episode length, distributed as Verlog reports for Crafter: 70 to 400 turns, about 190 on average."""
    return min(400, max(70, round(random.Random(seed).lognormvariate(5.15, 0.42))))


class InstantEngine(EngineClient):
    """An engine in this process; `turn_s` seconds per turn and `places` requests at once simulate a real one."""

    def __init__(self, source: EngineClient, answer: list[int], turn_s: float, places: int) -> None:
        super().__init__(source.url, source.settings)
        self.answer, self.turn_s, self.places = answer, turn_s, asyncio.Semaphore(places)

    async def generate(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> Generation:
        with self.utilization.request():
            async with self.places:
                if self.turn_s:
                    await asyncio.sleep(self.turn_s)
        meta = {"finish_reason": {"type": "stop"}}
        return Generation(self.answer, [-0.5] * len(self.answer), "", FinishReason.STOP, ("1",), meta)


def serve(port: Any) -> None:
    """Serve an engine in another process, so that its CPU time is not counted."""

    async def forever() -> None:
        async with ScriptedEngine(chatml_tokenizer(), lambda body, number: ANSWER) as engine:
            port.send(engine.port)
            await asyncio.Event().wait()

    asyncio.run(forever())


async def prepare(folder: Path, slots: int, turns: int, port: int = 1) -> tuple[Any, EpisodeSource, Any]:
    """Arguments, data source and runtime of a game with episodes as long as Crafter's."""
    args = rollout_args(
        folder,
        port,
        rollout_batch_size=turns,
        global_batch_size=turns,
        n_env=slots,
        env_backend="inline",
        env_workers=1,
        rollout_max_context_len=None,
        env={"length_of": "benchmarks.rollout.crafter_like_length", "preset": "verlog"},
    )
    return args, EpisodeSource(args), await get_runtime(args)


def simulated(runtime: Any, turn_s: float, places: int) -> InstantEngine:
    """The engine in this process."""
    answer = runtime.encoder.tokenizer.encode(f"{ANSWER}<|im_end|>")
    return InstantEngine(runtime.engine, answer, turn_s, places)


async def host_time(folder: Path, turns: int, port: int | None) -> tuple[float, float]:
    """CPU milliseconds of this process per turn, and the environment's part of them; over HTTP if `port` is given."""
    args, source, runtime = await prepare(folder, 32, turns, port or 1)
    if port is None:
        runtime.engine = simulated(runtime, 0.0, 32)
    await collect(args, 0, source)
    before = resource.getrusage(resource.RUSAGE_SELF)
    segments = (await collect(args, 1, source)).segments
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    env = sum(turn.env_s for segment in segments for turn in segment.turns)
    await close_runtimes()
    return 1e3 * cpu / turns, 1e3 * env / turns


async def fixed_turn_busy(folder: Path, slots: int, places: int, turns: int, turn_s: float) -> float:
    """Share of the engine's place-seconds spent on turns of the batches."""
    args, source, runtime = await prepare(folder, slots, turns)
    runtime.engine = simulated(runtime, turn_s, places)
    await collect(args, 0, source)
    began = time.perf_counter()
    batches = 2
    for k in range(1, 1 + batches):
        await collect(args, k, source)
    ideal = batches * turns * turn_s / places
    busy = ideal / (time.perf_counter() - began)
    await close_runtimes()
    return busy


def episode_loop_busy(slots: int, turns: int) -> float:
    """The same share for batches of whole episodes: `slots` episodes start together, and the longest ends the batch.

    This is computed, not measured: the loop starts one episode per slot, waits for all of them, and trains.
    """
    lengths = [crafter_like_length(seed) for seed in range(20 * slots)]
    shares = []
    for k in range(20):
        batch = lengths[k * slots : (k + 1) * slots]
        shares.append(sum(batch) / (slots * max(batch)))
    return statistics.mean(shares)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2048)
    parser.add_argument("--places", type=int, default=96, help="requests that the simulated engine runs at once")
    parser.add_argument("--turn-s", type=float, default=0.5, help="simulated engine time of one turn")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    engine.start()
    places, more = options.places, options.places * 4 // 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, port in (("in process", None), ("over HTTP", ours.recv())):
            cpu, env = await host_time(folder, options.turns, port)
            print(f"{f'host ms per turn (CPU), engine {label}':<60}{cpu:8.3f}   of which environment {env:.3f}")
        for slots in (places, more):
            busy = await fixed_turn_busy(folder, slots, places, options.turns, options.turn_s)
            print(f"{f'useful engine time, {slots} slots for {places} places':<60}{busy:8.1%}")
    loop = episode_loop_busy(places, options.turns)
    print(f"{'useful engine time, waiting for whole episodes':<60}{loop:8.1%}")
    print(f"{'ratio':<60}{busy / loop:8.2f}")
    engine.terminate()


if __name__ == "__main__":
    asyncio.run(main())
