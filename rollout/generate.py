"""One whole episode inside slime's own outer loop (`--custom-generate-function-path`).

`history: full` gives one sample with all turns, observations masked. `history: window` gives one sample per turn, all
in the training group of the sample that slime handed out. An aborted episode keeps its environment and continues when
slime hands the sample out again; `--mask-offpolicy-in-partial-rollout` masks the turns played before the abort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.bridge.framework import Sample, outer_loop_is_full
from rollout.bridge.sample import (
    SampleWriter,
    episode_spec,
    group_number,
    mark_aborted,
    mark_failed,
)
from rollout.bridge.whole_episodes import EpisodeSamples
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.player import Place, play
from rollout.play.runtime import Runtime, get_runtime
from rollout.play.slots import Parked
from rollout.samples import episode_samples
from rollout.spec import EpisodeSpec
from rollout.turn import Segment, Turn


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode that `sample.metadata` names (`task`, `seed`) to its end.

    Returns one sample (`history: full`) or a list: one sample per turn (`history: window`), or the whole episode and
    the state after it (`history: full` with `bootstrap_on_time_limit`). All episodes of a run that reach a batch have
    the same form, because slime looks at the first one only. Every sample's reward is the episode's return. Its status
    is COMPLETED, TRUNCATED when a limit ended the episode, or FAILED with everything masked when the environment was
    lost. A single sample with status ABORTED was stopped by slime's loop, which does not train on it; the
    episode continues when slime hands that sample out again.

    Raises:
        EngineError: the engine did not answer within the allowed retries.
        ConfigError: the sample names no task and seed, or the first prompt does not fit.
    """
    runtime = await get_runtime(args)
    settings, flags = runtime.settings, runtime.flags
    spec = episode_spec(sample, settings.rollout_interaction_env_path, settings.env, settings.max_turns)
    parked = runtime.parked.take(sample)
    turns = parked.turns if parked else []
    stale = len(turns) if flags.mask_offpolicy_in_partial_rollout else 0
    place = Place(lambda: open_episode(runtime, spec), parked.episode if parked else None)
    try:
        ended = await _play(runtime, place, turns, sampling_params, evaluation)
        if ended is None:
            if flags.aborted_samples_return and (paused := place.release()) is not None:
                await runtime.parked.park(Parked(sample, paused, turns), flags.max_begun_samples)
            return mark_aborted(sample)
    finally:
        await place.leave()
    if isinstance(ended, EnvironmentFault):
        runtime.counters["episodes_failed"] += 1
        return _in_form(runtime, failed_samples(runtime.samples, sample, spec, str(ended)))
    segment = replace(ended, bootstrap=None) if evaluation else ended
    joined = settings.history == "full"
    return _in_form(runtime, episode_samples(runtime.samples, sample, segment, joined=joined, stale=stale))


async def _play(
    runtime: Runtime, place: Place, turns: list[Turn], params: Mapping[str, Any], evaluation: bool
) -> Segment | EnvironmentFault | None:
    """Play to the end of the episode, and return it or its fault; None if the outer loop aborted it first."""
    ended: list[Segment | EnvironmentFault] = []

    async def may_issue() -> bool:
        return not ended and (evaluation or not outer_loop_is_full())

    def gives_up() -> bool:
        return not evaluation and _aborted_by_outer_loop(runtime)

    def record(episode: Episode, turn: Turn) -> None:
        turns.append(turn)
        if episode.stop is not None:
            ended.append(episode.segment(turns, episode.stop))

    try:
        await place.live()  # before the first question whether slime has enough, because this may take long
    except EnvironmentFault as fault:
        return fault
    await play(place, may_issue, lambda episode: episode.generate(params, gives_up), record, ended.append)
    return ended[0] if ended else None


def _aborted_by_outer_loop(runtime: Runtime) -> bool:
    """Whether an abort comes from the outer loop, which does not train on aborted samples.

    slime's own loop says when it aborts; every other abort comes from the engine, and the turn is sent again. slime's
    fully asynchronous loop and loops of other projects take every aborted sample back.
    """
    return outer_loop_is_full() is not False or runtime.flags.is_fully_asynchronous


def _in_form(runtime: Runtime, samples: list[Sample]) -> Sample | list[Sample]:
    """One sample or a list, the same for every episode of this run."""
    alone = runtime.settings.history == "full" and not runtime.settings.bootstrap_on_time_limit
    return samples[0] if alone else EpisodeSamples(samples)


def failed_samples(writer: SampleWriter, sample: Sample, spec: EpisodeSpec, fault: str) -> list[Sample]:
    """One masked token in place of an episode whose environment was lost; the batch keeps its size."""
    writer.make_inert(sample, group_number(sample))
    mark_failed(sample, spec, fault)
    return [sample]
