"""Batches of exactly `rollout_batch_size` x `n_samples_per_prompt` turns, from episodes that outlive the batch.

`n_env` slots share the batch's budget of turns. An episode that still runs at its end is cut: its next prompt becomes a
bootstrap sample, and it continues in the next batch. No turn is thrown away or generated twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from rollout.bridge.checks import check_fixed_turn
from rollout.bridge.framework import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, run
from rollout.bridge.sample import build_samples
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.metrics import batch_metrics, measure, warn_of_bottleneck
from rollout.play.player import Batch, Slot, count_failure, count_turns, gather, play
from rollout.play.runtime import Runtime, full_gc_deferred, get_runtime
from rollout.play.slots import restore_slots
from rollout.samples import pretraining_samples
from rollout.turn import Segment, StopReason, Turn
from slime_verlog import BAR_S

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return one batch of turns, or the held-out episodes if `evaluation` (slime's `--rollout-function-path`).

    A batch's `samples` has one list per segment: its turns, then its bootstrap sample, if any. In the last batch of
    value pretraining, it has one list per turn. `metrics` are floats by name.
    `rollout.evaluate.evaluate` says what comes back of held-out episodes.

    Raises:
        ConfigError: flags and YAML contradict each other, the checkpoint has no tokenizer, or too few turns were kept
            for the critic's warm-up or value pretraining; the text says what to change.
        EncodingError: the chat template does not support `history`, or does not show the environment's tools.
        EngineError: the engine refused a request, or did not answer within the allowed retries.
        FailureBudgetError: too many episodes of the batch failed; the text says how to reproduce the last failure.
        PlayerError: rollout processes (`rollout_processes`) cannot be started, or die again and again.
        MissingDependencyError: `env_backend` is `ray`, and Ray is not installed.
        CheckpointError: slime saves after this batch, and the rollout's state cannot be written.
    """
    return rollout_with(collect, args, rollout_id, data_source, evaluation)


Collect = Callable[[Any, int, EpisodeSource], Awaitable[Batch]]
"""Plays the batch of a rollout id."""


def rollout_with(
    collector: Collect, args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the batch that `collector` plays, as slime's samples, or the held-out episodes if `evaluation`.

    Raises as `generate_rollout`, ConfigError also for another data source than `EpisodeSource`.
    """
    if not isinstance(data_source, EpisodeSource):
        raise ConfigError(
            f"fixed-turn batches are made of episodes, but the data source is a {type(data_source).__name__}: give "
            "--data-source-path rollout.data_source.EpisodeSource"
        )
    if evaluation:
        from rollout.evaluate import evaluate

        return run(evaluate(args, data_source))
    check_fixed_turn(args, data_source.settings)
    return run(collect_or_draw(args, rollout_id, data_source, collector))


async def collect_or_draw(
    args: Any, rollout_id: int, source: EpisodeSource, collector: Collect | None = None
) -> RolloutFnTrainOutput:
    """Play this rollout's batch, or draw it from the turns that the critic's warm-up kept.

    In value pretraining, the last batch holds the turns of all batches. Raises as `generate_rollout`.
    """
    runtime = await get_runtime(args)
    warmup, pretraining = source.settings.critic_warmup, source.settings.value_pretraining
    play_batch = partial(collector or collect, args, rollout_id, source)
    if warmup.w_epoch or pretraining.batches or source.kept:
        from rollout.play.kept import play_or_draw

        batch = await play_or_draw(play_batch, source.kept, rollout_id, runtime)
    else:
        batch = await play_batch()
    if rollout_id + 1 == pretraining.batches:
        samples = await asyncio.to_thread(_pretraining_samples, runtime, source)
    else:
        samples = await _samples(runtime, source, batch)
    await asyncio.to_thread(source.end_batch, rollout_id, batch.slots)
    return RolloutFnTrainOutput(samples=samples, metrics=batch.metrics)


async def collect(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Play the batch of `rollout_id`: all slots share its budget of turns until it is used up.

    Raises as `generate_rollout`, but never CheckpointError.
    """
    runtime = await get_runtime(args)
    await open_slots(runtime, source)
    slots, turns = source.slots, runtime.flags.turns_per_batch
    # With more slots than turns, only the first ones play; the next batch begins where this one stops.
    first = rollout_id * turns % len(slots)
    order = slots[first:] + slots[:first]
    per_env = runtime.settings.turn_quota == "per_env"
    batch = Batch(left=[turns // len(slots)] * len(slots) if per_env else [turns])
    measured = measure(runtime)
    await measured()  # what players did since the last batch is not this one's
    with tqdm(total=turns, desc=f"rollout {rollout_id}", unit="turn", leave=False, mininterval=BAR_S) as progress:
        async with full_gc_deferred():
            played = await gather(_play(runtime, slot, batch, progress.update) for slot in order)
    by_slot = {slot.number: segments for slot, segments in zip(order, played, strict=True)}
    batch.segments = [
        replace(segment, turns=runtime.trainable(segment.turns)) for slot in slots for segment in by_slot[slot.number]
    ]
    count = count_turns(batch.segments)
    assert count == turns, f"the batch has {count} turns instead of {turns}"
    load = await measured()
    warn_of_bottleneck(runtime, load)
    batch.staleness = source.staleness(batch.segments, rollout_id, asked_since=True)
    allowed, oldest = 0 if source.clock.after_each else source.clock.interval, max(batch.staleness)
    if oldest > allowed and "staleness" not in runtime.warned:
        runtime.warned.add("staleness")
        logger.warning("turn/staleness_max is %d, above %d: an engine may not get new weights", oldest, allowed)
    batch.metrics = await asyncio.to_thread(
        batch_metrics, batch.segments, runtime.new_faults(), load, batch.staleness, len(source.tasks)
    )
    return batch


async def open_slots(runtime: Runtime, source: EpisodeSource) -> None:
    """Make the source's slots, or restore those of a checkpoint; does nothing if there are slots already.

    Slot k plays the episodes k, k + n_env, and so on. Live episodes of a checkpoint that cannot be restored are given
    up and counted. Raises EncodingError, PlayerError and MissingDependencyError as `generate_rollout`.
    """
    if source.slots:
        return

    async def open_id(episode_id: int) -> Episode:
        return await open_episode(runtime, source.episode(episode_id))

    slots = [Slot(k, k, source.settings.n_env, open_id) for k in range(source.settings.n_env)]
    if source.saved_slots:
        await restore_slots(runtime, slots, source.episode, source.saved_slots)
    source.slots, source.saved_slots = slots, []


async def _play(runtime: Runtime, slot: Slot, batch: Batch, count_turn: Callable[[], Any]) -> list[Segment]:
    """Play one slot's share of the batch; at its end, cut the episode that still runs."""
    params = runtime.flags.sampling_params()
    segments: list[Segment] = []
    turns: list[Turn] = []
    """The turns of the slot's current episode in this batch."""

    def close(stop: StopReason) -> None:
        if turns and slot.episode is not None:
            segments.append(slot.episode.segment(turns, stop))
            turns.clear()

    async def may_issue() -> bool:
        return batch.issue(slot.number)

    def record(episode: Episode, turn: Turn) -> None:
        turns.append(turn)
        count_turn()
        if episode.stop is not None:
            close(episode.stop)

    def lose(fault: EnvironmentFault) -> None:
        batch.give_back(slot.number)
        batch.failed += 1
        count_failure(fault, batch.failed, runtime)
        close(StopReason.FAILED)

    await play(slot, may_issue, lambda episode: episode.generate(params), record, lose)
    close(StopReason.CUT)
    episode, spread = slot.episode, runtime.settings.stagger_turns
    is_first = episode is not None and episode.spec.episode_id == slot.number
    if is_first and spread and len(episode.answers) >= spread * (slot.number + 1) / runtime.settings.n_env:
        await slot.leave()
    return segments


async def _samples(runtime: Runtime, source: EpisodeSource, batch: Batch) -> list[list[Sample]]:
    """slime's samples for the batch's segments, in training groups that were never used before."""
    ids = source.take_group_ids(count_turns(batch.segments))
    # In a thread, because thousands of samples take long enough to stall the event loop.
    return await asyncio.to_thread(build_samples, batch.segments, ids, runtime.samples, batch.staleness)


def _pretraining_samples(runtime: Runtime, source: EpisodeSource) -> list[list[Sample]]:
    from rollout.play.kept import choose_held_out, join_episodes

    segments, seed = join_episodes(source.kept), runtime.flags.rollout_seed
    held_out = choose_held_out(segments, source.settings.value_pretraining.held_out, seed)
    ids = source.take_group_ids(count_turns(segments))
    return pretraining_samples(segments, held_out, ids, seed, runtime.samples)
