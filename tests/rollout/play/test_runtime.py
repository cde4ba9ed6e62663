"""What a run owns in a process, and its garbage collections."""

import gc

import pytest

from rollout.errors import EngineError
from rollout.play.runtime import full_gc_deferred


async def test_full_garbage_collections_are_deferred_to_the_end_of_a_batch_even_if_it_fails() -> None:
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
