"""Environment workers: CPU time per turn in the trainer and in the workers, and turns per second with 1, 2 ... workers.

    python -m benchmarks.env_workers [--workers 1 2] [--turns 2000]

The world's share is the time inside `step`, measured in the worker, so it includes waiting for a CPU. Turns per second
mean something only on a machine with nothing else to do. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_server import Host
from inspection.text import align
from rollout.bridge.settings import RolloutSettings
from rollout.spec import EnvSpec
from rollout.workers.guard import descendants
from rollout.workers.pool import EnvPool

SESSIONS_PER_WORKER = 8
_COMMANDS = ("look", "inventory", "go north", "go south", "go east", "go west", "open box", "take all")
_MOVES = ("Noop", "Move West", "Move East", "Move North", "Move South", "Do")
CASES: dict[str, tuple[str, str, dict[str, Any], Sequence[str]]] = {
    "crafter": ("envs.crafter", "default", {}, _MOVES),
    "crafter, images": ("envs.crafter", "default", {"vlm": True}, _MOVES),
    "textworld": ("envs.textworld", "treasure_hunter", {"games": 2}, _COMMANDS),
}


async def _play(pool: EnvPool, case: str, number: int, turns: int) -> float:
    """Play `turns` turns, episode after episode; returns the seconds inside `step`."""
    env_path, task, options, answers = CASES[case]
    rng, world_s, session = random.Random(number), 0.0, None
    for _ in range(turns):
        if session is None:
            session = await pool.open(EnvSpec(env_path, {"task": task, "seed": number}, options))
        reply = await session.step(rng.choice(answers))
        world_s += reply.seconds
        if reply.done:
            await session.close()
            session = None
    return world_s


async def measure(case: str, workers: int, turns: int) -> tuple[float, float, float, float]:
    """Return turns per second, and CPU ms per turn in the trainer, in the workers, and in the workers inside `step`."""
    pool = EnvPool(
        RolloutSettings(rollout_interaction_env_path=CASES[case][0], env_backend="process", env_workers=workers)
    )
    try:
        each = turns // (workers * SESSIONS_PER_WORKER)
        sessions = range(workers * SESSIONS_PER_WORKER)
        await asyncio.gather(*(_play(pool, case, number, each // 4) for number in sessions))
        clocks = [Host(pid) for pid in descendants(os.getpid())]
        began, trainer, working = time.perf_counter(), time.process_time(), sum(clock.cpu_s() for clock in clocks)
        world_s = sum(await asyncio.gather(*(_play(pool, case, number, each) for number in sessions)))
        seconds, trainer = time.perf_counter() - began, time.process_time() - trainer
        working = sum(clock.cpu_s() for clock in clocks) - working
        played = each * len(sessions)
        return played / seconds, 1000 * trainer / played, 1000 * working / played, 1000 * world_s / played
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    parser.add_argument("--turns", type=int, default=2000, help="turns per measurement (default: %(default)d)")
    parser.add_argument("--only", choices=CASES, help="one of the environments (default: all)")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; resets are included; ms per turn")
    rows = [["environment", "workers", "turns/s", "ratio", "trainer CPU", "worker CPU", "world"]]
    for case in [options.only] if options.only else CASES:
        found = [asyncio.run(measure(case, workers, options.turns)) for workers in options.workers]
        for workers, (speed, *parts) in zip(options.workers, found, strict=True):
            ratio = speed / found[0][0]
            rows.append([case, str(workers), f"{speed:,.0f}", f"{ratio:.2f}", *(f"{part:.3f}" for part in parts)])
    print("\n".join(align(rows, 1)))


if __name__ == "__main__":
    main()
