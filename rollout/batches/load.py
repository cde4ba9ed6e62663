"""How busy engine, environments and event loops are while batches are played."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollout.batches.metrics import BatchLoad
from rollout.play.parts import Runtime
from rollout.workers.utilization import Usage

logger = logging.getLogger(__name__)

BUSY = 0.8
"""Share of the time above which an event loop delays its slots."""
QUEUED = 0.5
"""Waiting requests per running one above which the engines' queues only make responses older."""
MIN_SECONDS = 10.0
"""Shorter batches tell nothing about bottlenecks."""


class LoadMeter:
    """Measures the load of a run between two calls of `take`."""

    def __init__(self, runtime: Runtime) -> None:
        """Start to measure."""
        self._runtime = runtime
        self._before = runtime.usage()
        runtime.engine_loads.start()

    async def take(self) -> BatchLoad:
        """Return the load since the last call, or since the start."""
        runtime = self._runtime
        if runtime.players is not None:
            await runtime.players.refresh()
        then = self._before
        self._before = runtime.usage()
        used = [now.plus(one, -1) for now, one in zip(self._before, then, strict=True)]
        engine = _together([one.engine for one in used])
        env = _together([one.env for one in used])
        host_s = sum(one.cpu_s for one in used)
        return BatchLoad(engine, env, host_s, used, runtime.engine_loads.take())


def _together(processes: Sequence[Usage]) -> Usage:
    """The usage of all processes; the busiest one tells when any of them is busy."""
    busy_s = max(one.busy_s for one in processes)
    request_s = sum(one.request_s for one in processes)
    return Usage(processes[0].seconds, busy_s, request_s)


def warn_of_bottleneck(runtime: Runtime, load: BatchLoad, stood_s: float = 0.0) -> None:
    """Log, once per kind, what the slots wait for most and the setting that relieves it.

    `stood_s`: seconds for which slots of a continuous batch waited for new weights, summed over the
    slots.
    """
    seconds = load.engine.seconds
    slots = runtime.settings.n_env
    if seconds < MIN_SECONDS:
        return
    cpu = [one.cpu_s / seconds for one in load.processes]
    # Episodes that start in the background while their slot plays another one count as waiting for
    # an environment.
    idle = slots - (load.engine.request_s + stood_s) / seconds
    busiest = cpu.index(max(cpu))
    waiting = min(load.env.request_s / seconds, idle)
    found = {}
    if max(cpu) > BUSY and (busiest or len(cpu) == 1):
        found["process"] = (
            f"a rollout process computes {max(cpu):.0%} of the time: raise rollout_processes"
        )
    elif max(cpu) > BUSY:
        found["manager"] = (
            f"the process that keeps the batch computes {max(cpu):.0%} of the time, which more "
            "rollout_processes do not relieve: shorten the prompts, or split the engines between "
            "two runs"
        )
    if waiting > slots / 2:
        found["env"] = (
            f"{waiting:.0f} of {slots} slots wait for their environment on average: raise "
            "env_workers"
        )
    if stood_s / seconds > slots / 2:
        found["trainer"] = (
            f"{stood_s / seconds:.0f} of {slots} slots wait for new weights on average, because "
            f"max_staleness is {runtime.settings.max_staleness}: raise it, or give the trainer "
            "more GPUs and the rollout fewer"
        )
    running = sum(one.running for one in load.engines.values())
    queued = sum(one.waiting for one in load.engines.values())
    if queued > max(QUEUED * running, 1.0):
        found["engine"] = (
            f"the engines run {running:.0f} requests at once on average, and {queued:.0f} wait in "
            "their queues: add engines, raise --sglang-max-running-requests if their memory "
            "allows, or lower n_env"
        )
    for kind in found.keys() - runtime.warned:
        runtime.warned.add(kind)
        logger.warning("bottleneck of the rollout: %s", found[kind])


@asynccontextmanager
async def full_gc_deferred() -> AsyncIterator[None]:
    """Defer Python's full garbage collections, each of some hundred milliseconds, and run one on
    exit."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        await asyncio.to_thread(gc.collect)
