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
from rollout.bridge.sample import episode_spec, mark_aborted
from rollout.bridge.whole_episodes import EpisodeSamples, episode_samples, failed_samples
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.parked import Parked
from rollout.play.runtime import Runtime, get_runtime
from rollout.turn import FinishReason, Turn


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
    episode, turns = (parked.episode, parked.turns) if parked else (None, [])
    stale = len(turns) if flags.mask_offpolicy_in_partial_rollout else 0
    try:
        if episode is None:
            episode = await open_episode(runtime, spec)
        if not await _play(episode, turns, sampling_params, evaluation):
            if flags.aborted_samples_return:
                paused, episode = episode, None
                await runtime.parked.park(Parked(sample, paused, turns), flags.most_begun_samples)
            return mark_aborted(sample)
    except EnvironmentFault as fault:
        runtime.counters["episodes_failed"] += 1
        return _in_form(runtime, failed_samples(runtime.samples, sample, spec, str(fault)))
    finally:
        if episode is not None:
            await episode.close()
    assert episode is not None and episode.stop is not None
    segment = episode.segment(turns, episode.stop)
    if evaluation:
        segment = replace(segment, bootstrap=None)
    joined = settings.history == "full"
    return _in_form(runtime, episode_samples(runtime.samples, sample, segment, joined=joined, stale=stale))


async def _play(episode: Episode, turns: list[Turn], params: Mapping[str, Any], evaluation: bool) -> bool:
    """Play to the end of the episode; False if the outer loop aborted it first."""
    retries = 0
    while episode.stop is None and (evaluation or not outer_loop_is_full()):
        generation = await episode.ask(params)
        if generation.finish_reason is not FinishReason.ABORT:
            turns.append(await episode.take(generation))
            retries = 0
        elif not evaluation and _aborted_by_outer_loop(episode.runtime):
            return False
        else:
            retries += 1
            await episode.after_abort(retries)
    return episode.stop is not None


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
