"""Batches of exactly `rollout_batch_size` x `n_samples_per_prompt` turns from episodes that outlive the batch.

`n_env` slots each play one episode after another. Turns are issued until the budget is issued, then what is in
flight is drained: nothing is thrown away, no turn is generated twice, and an episode that the batch cuts lends
its next prompt as bootstrap sample. The counts are asserted before the batch leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from rollout.bridge.checks import check_fixed_turn
from rollout.bridge.framework import GROUP_FIELD, RolloutFnEvalOutput, RolloutFnTrainOutput, run
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, EnvironmentFault, FailureBudgetError
from rollout.evaluate import evaluate
from rollout.play.episode import Episode
from rollout.play.metrics import BatchLoad, batch_metrics
from rollout.play.runtime import Runtime, full_collections_afterwards, get_runtime
from rollout.play.slots import FixedTurnState, Slot, restore_slots
from rollout.play.warmup import Phase, draw, phase_of
from rollout.samples import build_samples, fill_steps
from rollout.turn import Prompt, Segment, StopReason, Turn

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """slime's `--rollout-function-path`: one batch of turns, or the held-out episodes when `evaluation`.

    Raises:
        ConfigError: flags and YAML cannot work together; the text names the flag.
        EngineError: the engine did not answer within the retries allowed.
        FailureBudgetError: too many episodes failed; the text reproduces the last one.
    """
    if not isinstance(data_source, EpisodeSource):
        raise ConfigError(
            f"the fixed-turn rollout plays episodes, not a {type(data_source).__name__}: give "
            "--data-source-path rollout.data_source.EpisodeSource"
        )
    if evaluation:
        return run(evaluate(args, data_source))
    check_fixed_turn(args, data_source.settings)
    return run(collect_or_draw(args, rollout_id, data_source))


async def collect_or_draw(args: Any, rollout_id: int, source: EpisodeSource) -> RolloutFnTrainOutput:
    """The batch of this rollout: played, or drawn where the warm-up says so."""
    warmup = source.settings.critic_warmup
    phase = phase_of(rollout_id, warmup)
    if phase is Phase.DRAW:
        flags = source.flags
        segments = draw(source.kept, warmup.fraction, flags.global_batch_size, flags.rollout_seed + rollout_id)
        metrics = {"warmup/drawn_turns": float(sum(len(s.turns) for s in segments))}
        return await train_output(args, source, segments, metrics)
    segments, metrics = await collect(args, rollout_id, source)
    if phase is Phase.COLLECT:
        source.kept.extend(segments)
        metrics["warmup/kept_turns"] = float(sum(len(s.turns) for s in source.kept))
    else:
        source.kept.clear()
    return await train_output(args, source, segments, metrics)


@dataclass
class Batch:
    """The batch under way: what is still to issue, what each slot has played, what failed."""

    to_issue: int
    quota: dict[int, int] | None
    progress: Any
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    playing: dict[int, list[Turn]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def issue(self, slot: int) -> bool:
        """Take one turn from the budget; False when it is used up."""
        if self.to_issue == 0 or (self.quota is not None and self.quota[slot] == 0):
            return False
        self.to_issue -= 1
        if self.quota is not None:
            self.quota[slot] -= 1
        return True

    def give_back(self, slot: int) -> None:
        self.to_issue += 1
        if self.quota is not None:
            self.quota[slot] += 1

    def end_segment(self, slot: int, episode: Episode | None, stop: StopReason, bootstrap: Prompt | None) -> None:
        """Close the slot's current segment, if it has played any turn in this batch."""
        turns = self.playing.pop(slot, [])
        if turns and episode is not None:
            segment = Segment(
                episode.spec.name, tuple(turns), bootstrap, stop, episode.total_reward, episode.index
            )
            self.segments.setdefault(slot, []).append(segment)


async def collect(args: Any, rollout_id: int, source: EpisodeSource) -> tuple[list[Segment], dict[str, float]]:
    """Play one batch; return its segments in slot order, and the batch's metrics."""
    runtime = await get_runtime(args)
    before = runtime.fault_counts()  # ahead of the slots, so that what a resume loses counts in its first batch
    state = await _state(runtime, source)
    turns = runtime.flags.turns_per_batch
    per_env = source.settings.turn_quota == "per_env"
    quota = {slot.number: turns // len(state.slots) for slot in state.slots} if per_env else None
    measured = _measure(runtime)
    with tqdm(total=turns, desc=f"rollout {rollout_id}", unit="turn", leave=False) as progress:
        batch = Batch(turns, quota, progress)
        async with full_collections_afterwards():
            await _gather([_play(slot, batch, runtime, source) for slot in _in_turn(state.slots, rollout_id * turns)])
    for slot in state.slots:
        batch.end_segment(slot.number, slot.episode, StopReason.CUT, slot.episode and slot.episode.prompt)
    segments = [segment for slot in state.slots for segment in batch.segments.get(slot.number, [])]
    played = sum(len(segment.turns) for segment in segments)
    assert played == turns, f"the batch has {played} turns, not {turns}"
    faults = runtime.fault_counts() - before + batch.failures
    return segments, await asyncio.to_thread(batch_metrics, segments, faults, measured())


def _measure(runtime: Runtime) -> Callable[[], BatchLoad]:
    """Start to measure; the function that comes back says what was taken since."""
    engine, env, host_s = runtime.engine.utilization, runtime.pool.utilization, time.thread_time()
    before = engine.snapshot(), env.snapshot()
    return lambda: BatchLoad(engine.since(before[0]), env.since(before[1]), time.thread_time() - host_s)


def _in_turn(slots: list[Slot], issued: int) -> list[Slot]:
    """The slots in the order in which they ask for their first turn, given the turns of all earlier batches.

    With more slots than turns only the first ones get any. So each batch begins where the one before it stopped.
    """
    first = issued % len(slots)
    return slots[first:] + slots[:first]


async def _state(runtime: Runtime, source: EpisodeSource) -> FixedTurnState:
    """The live slots; made at the first batch, or brought back from a checkpoint."""
    if isinstance(source.state, FixedTurnState):
        return source.state
    n_env = source.settings.n_env
    saved, source.state = source.state, None
    if saved is not None:
        slots = await restore_slots(saved, runtime, n_env, source.episode)
    else:
        slots = [Slot(number, number, n_env) for number in range(n_env)]
    source.state = FixedTurnState(runtime, slots)
    return source.state


async def _play(slot: Slot, batch: Batch, runtime: Runtime, source: EpisodeSource) -> None:
    """One slot's share of the batch: issue, play, record, until nothing is left to issue."""
    params = runtime.flags.sampling_params()
    while batch.issue(slot.number):
        try:
            episode = await slot.live(runtime, source.episode)
            turn = await episode.play_turn(params)
        except EnvironmentFault as fault:
            batch.give_back(slot.number)
            await _abandon(slot, batch, runtime, fault)
            continue
        batch.playing.setdefault(slot.number, []).append(turn)
        batch.progress.update()
        if episode.stop is not None:
            wanted = runtime.settings.bootstrap_on_time_limit and turn.truncated
            batch.end_segment(slot.number, episode, episode.stop, episode.final_prompt if wanted else None)
            await slot.leave()


async def _abandon(slot: Slot, batch: Batch, runtime: Runtime, fault: EnvironmentFault) -> None:
    """Give up an episode whose environment is lost; its turns so far stay and are bootstrapped."""
    batch.failures["episodes_failed"] += 1
    budget = runtime.settings.max_episode_failures_per_batch
    if batch.failures["episodes_failed"] > budget:
        raise FailureBudgetError(
            f"{batch.failures['episodes_failed']} episodes of one batch failed; "
            f"max_episode_failures_per_batch is {budget}. Last failure:\n{fault}"
        ) from fault
    logger.warning("episode abandoned (%d of %d allowed): %s", batch.failures["episodes_failed"], budget, fault)
    batch.end_segment(slot.number, slot.episode, StopReason.FAILED, slot.episode and slot.episode.prompt)
    await slot.leave()


async def _gather(coroutines: list[Any]) -> None:
    """Run all; on the first error stop the rest and raise that error itself."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def train_output(
    args: Any, source: EpisodeSource, segments: list[Segment], metrics: dict[str, float]
) -> RolloutFnTrainOutput:
    """Segments as slime's training output, with fresh group ids."""
    runtime = await get_runtime(args)
    ids = source.take_group_ids(sum(len(segment.turns) for segment in segments))
    # Thousands of samples take a while to build: not on the loop.
    groups = await asyncio.to_thread(build_samples, segments, ids, runtime.samples)
    if GROUP_FIELD is None:
        groups = fill_steps(groups, runtime.flags.global_batch_size, runtime.samples)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)
