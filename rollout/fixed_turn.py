"""Batches of exactly `rollout_batch_size` x `n_samples_per_prompt` turns, from episodes that
outlive the batch.

`n_env` slots share the batch's budget of turns. An episode that still runs at its end is cut: its
next prompt becomes a bootstrap sample, and it continues in the next batch. No turn is thrown away
or generated twice.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from rollout.batches.load import LoadMeter, full_gc_deferred, warn_of_bottleneck
from rollout.batches.metrics import batch_metrics
from rollout.batches.slots import restore_slots
from rollout.bridge.checks import check_fixed_turn
from rollout.bridge.framework import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, run
from rollout.bridge.sample import build_samples
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.loop import Slot, count_turns, gather, play
from rollout.play.parts import Runtime
from rollout.play.runtime import get_runtime
from rollout.samples import pretraining_samples, turns_per_sample
from rollout.turn import Batch, Generation, Segment, StopReason, Turn
from slime_verlog import BAR_S

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return one batch of turns, or the held-out episodes if `evaluation` (slime's
    `--rollout-function-path`).

    A batch's `samples` has one list per segment: its turns, then its bootstrap sample, if any. In
    the last batch of value pretraining, it has one list per turn. `metrics` are floats by name.
    `rollout.evaluate.evaluate` says what comes back of held-out episodes.

    Raises:
        ConfigError: flags and YAML contradict each other, the checkpoint has no tokenizer, or too
            few turns were kept for the critic's warm-up or value pretraining; the text says what to
            change.
        EncodingError: the chat template does not support `history`, or does not show the
            environment's tools.
        EngineError: the engine refused a request, or did not answer within the allowed retries.
        FailureBudgetError: too many episodes of the batch failed; the text says how to reproduce
            the last failure.
        PlayerError: rollout processes (`rollout_processes`) cannot be started, or die again and
            again.
        MissingDependencyError: `env_backend` is `ray`, and Ray is not installed.
        CheckpointError: slime saves after this batch, and the rollout's state cannot be written.
    """
    return rollout_with(collect, args, rollout_id, data_source, evaluation)


Collect = Callable[[Any, int, EpisodeSource], Awaitable[Batch]]
"""Plays the batch of a rollout id."""


def rollout_with(
    collector: Collect, args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the batch that `collector` plays, as slime's samples, or the held-out episodes if
    `evaluation`.

    Raises as `generate_rollout`, ConfigError also for another data source than `EpisodeSource`.
    """
    if not isinstance(data_source, EpisodeSource):
        raise ConfigError(
            "fixed-turn batches are made of episodes, but the data source is a "
            f"{type(data_source).__name__}: give --data-source-path "
            "rollout.data_source.EpisodeSource"
        )
    if evaluation:
        from rollout.evaluate import evaluate

        return run(evaluate(args, data_source))
    if not data_source.slots:  # before the first batch
        check_fixed_turn(args, data_source.settings)
    return run(collect_or_draw(args, rollout_id, data_source, collector))


async def collect_or_draw(
    args: Any, rollout_id: int, source: EpisodeSource, collector: Collect | None = None
) -> RolloutFnTrainOutput:
    """Play this rollout's batch, or draw it from the turns that the critic's warm-up kept.

    In value pretraining, the last batch holds the turns of all batches. Raises as
    `generate_rollout`.
    """
    runtime = await get_runtime(args)
    warmup = source.settings.critic_warmup
    pretraining = source.settings.value_pretraining
    play_batch = partial(collector or collect, args, rollout_id, source)
    if warmup.w_epoch or pretraining.batches or source.kept:
        from rollout.batches.kept import play_or_draw

        batch = await play_or_draw(play_batch, source.kept, rollout_id, runtime)
    else:
        batch = await play_batch()
    if rollout_id + 1 == pretraining.batches:
        samples = await asyncio.to_thread(_pretraining_samples, runtime, source)
    else:
        samples = await _samples(runtime, source, batch)
        batch.metrics["rollout/turns_per_sample"] = turns_per_sample(samples)
    await asyncio.to_thread(source.end_batch, rollout_id, batch.slots)
    return RolloutFnTrainOutput(samples=samples, metrics=batch.metrics)


async def collect(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Play the batch of `rollout_id`: all slots share its budget of turns until it is used up.

    Raises as `generate_rollout`, but never CheckpointError.
    """
    runtime = await get_runtime(args)
    await open_slots(runtime, source)
    slots = source.slots
    turns = runtime.flags.turns_per_batch
    # With more slots than turns, only the first ones play; the next batch begins where this one
    # stops.
    first = rollout_id * turns % len(slots)
    order = slots[first:] + slots[:first]
    meter = LoadMeter(runtime)
    await meter.take()  # what players did since the last batch is not this one's
    with tqdm(
        total=turns, desc=f"rollout {rollout_id}", unit="turn", leave=False, mininterval=BAR_S
    ) as progress:
        collector = FixedTurns(runtime, len(slots), progress.update)
        async with full_gc_deferred():
            await gather(collector.play(slot) for slot in order)
    batch = Batch(collector.segments())
    count = count_turns(batch.segments)
    assert count == turns, f"the batch has {count} turns instead of {turns}"
    load = await meter.take()
    warn_of_bottleneck(runtime, load)
    batch.staleness = source.staleness(batch.segments, rollout_id, asked_since=True)
    _warn_of_old_weights(runtime, source, max(batch.staleness))
    batch.metrics = await asyncio.to_thread(
        batch_metrics,
        batch.segments,
        runtime.new_faults(),
        load,
        batch.staleness,
        len(source.tasks),
    )
    return batch


def _warn_of_old_weights(runtime: Runtime, source: EpisodeSource, oldest: int) -> None:
    allowed = 0 if source.clock.after_each else source.clock.interval
    if oldest > allowed and "staleness" not in runtime.warned:
        runtime.warned.add("staleness")
        logger.warning(
            "turn/staleness_max is %d, above %d: an engine may not get new weights", oldest, allowed
        )


class FixedTurns:
    """Collects one batch: its budget of turns, and the segments that its slots have played."""

    def __init__(self, runtime: Runtime, slots: int, on_turn: Callable[[], Any]) -> None:
        """`on_turn` is called after every turn."""
        turns = runtime.flags.turns_per_batch
        per_env = runtime.settings.turn_quota == "per_env"
        self._left = [turns // slots] * slots if per_env else [turns]
        """Turns left to issue: one number for all slots, or one per slot (`turn_quota:
        per_env`)."""
        self._runtime = runtime
        self._on_turn = on_turn
        self._params = runtime.flags.sampling_params()
        self._failed = 0
        """Episodes whose environment was lost."""
        self._turns: defaultdict[int, list[Turn]] = defaultdict(list)
        """By slot number: the turns of its current episode in this batch."""
        self._segments: defaultdict[int, list[Segment]] = defaultdict(list)

    async def play(self, slot: Slot) -> None:
        """Play the slot until the budget is used up; cut the episode that still runs."""
        await play(slot, self)
        self._close(slot, StopReason.CUT)
        if self._is_staggered(slot):
            await slot.leave()

    def _is_staggered(self, slot: Slot) -> bool:
        """Whether the slot's first episode is given up here, so that slots do not stay in step
        (`stagger_turns`)."""
        settings = self._runtime.settings
        episode = slot.episode
        if episode is None or episode.spec.episode_id != slot.number or not settings.stagger_turns:
            return False
        return len(episode.answers) >= settings.stagger_turns * (slot.number + 1) / settings.n_env

    def segments(self) -> list[Segment]:
        """What was played, in slot order."""
        played = [
            segment for number in sorted(self._segments) for segment in self._segments[number]
        ]
        return [
            replace(segment, turns=self._runtime.trainable(segment.turns)) for segment in played
        ]

    async def may_issue(self, slot: Slot) -> bool:
        """Take one turn from the budget that the slot uses, its own or the shared one; False if
        none is left."""
        place = slot.number % len(self._left)
        if self._left[place] == 0:
            return False
        self._left[place] -= 1
        return True

    async def ask(self, slot: Slot, episode: Episode) -> Generation:
        """Return the engine's response."""
        return await episode.generate(self._params)

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Keep the turn; the end of an episode closes its segment."""
        self._turns[slot.number].append(turn)
        self._on_turn()
        if episode.stop is not None:
            self._close(slot, episode.stop)

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        """Return the turn in flight to the budget, and close the segment."""
        self._left[slot.number % len(self._left)] += 1
        self._failed += 1
        self._runtime.count_failure(fault, self._failed)
        self._close(slot, StopReason.FAILED)

    def _close(self, slot: Slot, stop: StopReason) -> None:
        turns = self._turns.pop(slot.number, None)
        if turns and slot.episode is not None:
            self._segments[slot.number].append(slot.episode.segment(turns, stop))


async def open_slots(runtime: Runtime, source: EpisodeSource) -> None:
    """Make the source's slots, or restore those of a checkpoint; does nothing if there are slots
    already.

    Slot k plays the episodes k, k + n_env, and so on. Live episodes of a checkpoint that cannot be
    restored are given up and counted. Raises EncodingError, PlayerError and MissingDependencyError
    as `generate_rollout`.
    """
    if source.slots:
        return

    async def open_id(episode_id: int) -> Episode:
        return await open_episode(runtime, source.episode(episode_id))

    slots = [Slot(open_id, k, source.settings.n_env) for k in range(source.settings.n_env)]
    if source.saved_slots:
        await restore_slots(runtime, slots, source.episode, source.saved_slots)
    source.slots = slots
    source.saved_slots = []


async def _samples(runtime: Runtime, source: EpisodeSource, batch: Batch) -> list[list[Sample]]:
    """slime's samples for the batch's segments, in training groups that were never used before."""
    ids = source.take_group_ids(count_turns(batch.segments))
    # In a thread, because thousands of samples take long enough to stall the event loop.
    return await asyncio.to_thread(
        build_samples, batch.segments, ids, runtime.samples, batch.staleness
    )


def _pretraining_samples(runtime: Runtime, source: EpisodeSource) -> list[list[Sample]]:
    from rollout.batches.kept import choose_held_out, join_episodes

    segments = join_episodes(source.kept)
    seed = runtime.flags.rollout_seed
    held_out = choose_held_out(segments, source.settings.value_pretraining.held_out, seed)
    ids = source.take_group_ids(count_turns(segments))
    return pretraining_samples(segments, held_out, ids, seed, runtime.samples)
