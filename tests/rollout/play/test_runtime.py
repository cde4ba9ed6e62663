"""What a run owns in a process, and its garbage collections."""

import gc
from pathlib import Path
from typing import Any

import pytest

from rollout.batches.load import full_gc_deferred
from rollout.errors import EngineError
from rollout.play.build import build_runtime
from tests.fixtures.rollout_args import rollout_args

HEALTH = {f"rollout_health_check_{name}": 30.0 for name in ("first_wait", "interval", "timeout")}


@pytest.mark.parametrize(
    ("engine", "flags", "least_s"),
    [
        ({}, {}, 15),
        ({}, {"use_fault_tolerance": True, **HEALTH}, 90),
        ({"max_retries": 6}, {"use_fault_tolerance": True, **HEALTH}, 15),
    ],
    ids=["without fault tolerance", "with it", "the YAML decides"],
)
async def test_slime_has_the_time_to_replace_a_dead_engine(
    tmp_path: Path, engine: dict[str, Any], flags: dict[str, Any], least_s: float
) -> None:
    runtime = build_runtime(rollout_args(tmp_path, **{"engine": engine, **flags}))
    client = runtime.engine
    client._jitter.uniform = lambda low, high: low
    waited = sum(client._delay(attempt) for attempt in range(client.settings.max_retries))
    await runtime.close()
    assert least_s < waited < least_s + 30


async def test_full_garbage_collections_are_deferred_to_the_end_of_a_batch_even_if_it_fails() -> (
    None
):
    full: list[str] = []
    watch = lambda phase, info: full.append(phase) if info["generation"] == 2 else None
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    gc.callbacks.append(watch)
    try:
        with pytest.raises(EngineError):
            async with full_gc_deferred():
                full.clear()
                kept = [[number] for number in range(100_000)]
                during = len(full)
                raise EngineError("no engine", "refused")
        assert kept and not during and full
        assert gc.get_threshold() == (10, 2, 2)
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*thresholds)
