"""Batches cut from slots that never stop playing, also while the trainer works
(`rollout/batches/stream.py`)."""

import asyncio
from typing import Any

from tqdm import tqdm

from rollout.batches.load import full_gc_deferred, warn_of_bottleneck
from rollout.batches.metrics import batch_metrics
from rollout.batches.stream import Stream
from rollout.bridge.framework import RolloutFnEvalOutput, RolloutFnTrainOutput
from rollout.data_source import EpisodeSource
from rollout.fixed_turn import open_slots, rollout_with
from rollout.play.runtime import get_runtime
from rollout.turn import Batch
from slime_verlog import BAR_S


def generate_rollout(
    args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the stream's next batch, or the held-out episodes if `evaluation` (slime's
    `--rollout-function-path`).

    Raises:
        ConfigError: as `rollout.fixed_turn.generate_rollout`, or the engine does not say which
            weights wrote what.
        EngineError: as there, or a turn spanned a weight update more often than `max_turn_retries`
            allows.
        EncodingError, FailureBudgetError, PlayerError, MissingDependencyError, CheckpointError: as
            there.
    """
    return rollout_with(collect, args, rollout_id, data_source, evaluation)


async def collect(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Take the stream's next batch; the first call starts the stream.

    Raises as `generate_rollout`, but never CheckpointError.
    """
    runtime = await get_runtime(args)
    turns = runtime.flags.turns_per_batch
    if runtime.stream is None:
        await open_slots(runtime, source)
        runtime.stream = Stream(runtime, source.slots, turns, source.clock)
    stream = runtime.stream
    assert isinstance(stream, Stream)
    played = min(stream.pending, turns)
    bar = {"desc": f"rollout {rollout_id}", "unit": "turn", "leave": False, "mininterval": BAR_S}
    with tqdm(total=turns, initial=played, **bar) as progress:
        stream.on_turn = progress.update
        async with full_gc_deferred():
            batch = await stream.next_batch(rollout_id)
            pending = stream.pending  # before anything is awaited, because the slots play on
        stream.on_turn = lambda: None
    if runtime.flags.colocate or runtime.flags.offload_rollout:
        # The engine gives its GPUs to the trainer.
        await stream.pause()
    load, stood_s = await stream.since_last_batch()
    warn_of_bottleneck(runtime, load, stood_s)
    batch.staleness = source.staleness(batch.segments, rollout_id, asked_since=False)
    answers = (turn.generation for segment in batch.segments for turn in segment.turns)
    age = source.clock.token_staleness(answers, rollout_id)
    tasks = len(source.tasks)
    batch.metrics = await asyncio.to_thread(
        batch_metrics, batch.segments, runtime.new_faults(), load, batch.staleness, tasks
    )
    batch.metrics |= {
        "rollout/turns_pending": float(pending),
        "rollout/turns_masked_as_stale": float(batch.masked),
    }
    batch.metrics["rollout/slots_at_limit"] = stood_s / (load.engine.seconds or 1.0)
    batch.metrics |= {
        "rollout/stale_wait_s": batch.waited_s,
        **({} if age is None else {"turn/token_staleness": age}),
    }
    return batch
