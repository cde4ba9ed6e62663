"""One whole episode inside slime's own outer loop (`--custom-generate-function-path`).

An aborted episode keeps its environment and continues when slime hands its sample out again. With
`--mask-offpolicy-in-partial-rollout`, the turns played before the abort are not trained. With `history: window`, all
samples of an episode belong to the training group of the sample that slime handed out. Every episode of a run returns
the same form, a sample or a list, because slime decides by the first one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.bridge.framework import Sample, outer_loop_is_full
from rollout.bridge.sample import episode_spec, mark_aborted
from rollout.bridge.whole_episodes import EpisodeSamples
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.player import Place, play
from rollout.play.runtime import Parked, Runtime, get_runtime
from rollout.samples import episode_samples, failed_samples
from rollout.turn import Segment, Turn


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode that `sample.metadata` names (`task`, `seed`) to its end.

    Returns one sample (`history: full`), or a list: one sample per turn (`history: window`), or the whole episode and
    the state after it (`bootstrap_on_time_limit`). An evaluation returns the last sample alone, because slime takes the
    mean over samples. Every sample's reward is the episode's return. Its status is COMPLETED, TRUNCATED after a limit,
    or FAILED with everything masked: the environment was lost or could not start, for example because the metadata name
    no task and seed, or its first prompt does not fit. A single ABORTED sample was stopped by slime's loop, and
    continues when slime hands it out again.

    Raises:
        ConfigError: a setting or flag is invalid, or the checkpoint has no tokenizer.
        EncodingError: the chat template does not support `history`, or does not show the environment's tools.
        EngineError: the engine refused a request, or did not answer within the allowed retries.
        MissingDependencyError: `env_backend` is `ray`, and Ray is not installed.
    """
    runtime = await get_runtime(args)
    settings, flags = runtime.settings, runtime.flags
    spec = episode_spec(sample, settings.rollout_interaction_env_path, settings.env, settings.max_turns)
    parked = runtime.parked.take(sample)
    turns = parked.turns if parked else []
    stale = len(turns) if flags.mask_offpolicy_in_partial_rollout else 0
    longest = sampling_params.get("max_new_tokens") if evaluation else None
    place = Place(lambda: open_episode(runtime, spec, longest), parked.episode if parked else None)
    try:
        ended = await _play(runtime, place, turns, sampling_params, evaluation)
        if ended is None:
            comes_back = flags.partial_rollout or flags.is_fully_asynchronous
            if comes_back and (paused := place.release()) is not None:
                await runtime.parked.park(Parked(sample, paused, turns), flags.max_begun_samples)
            return mark_aborted(sample)
    finally:
        await place.leave()
    if isinstance(ended, EnvironmentFault):
        runtime.counters["episodes_failed"] += 1
        return _in_form(runtime, failed_samples(runtime.samples, sample, spec, str(ended)))
    ended = replace(ended, turns=runtime.trainable(ended.turns))
    segment = replace(ended, bootstrap=None) if evaluation else ended
    joined = settings.history == "full"
    samples = episode_samples(runtime.samples, sample, segment, joined=joined, stale=stale)
    return _in_form(runtime, samples[-1:] if evaluation else samples)


async def _play(
    runtime: Runtime, place: Place, turns: list[Turn], params: Mapping[str, Any], evaluation: bool
) -> Segment | EnvironmentFault | None:
    """Play to the end of the episode, and return it or its fault; None if the outer loop aborted it first."""
    ended: list[Segment | EnvironmentFault] = []

    async def may_issue() -> bool:
        return not ended and (evaluation or not outer_loop_is_full())

    def gives_up() -> bool:
        # Under slime's own loop, every other abort is the engine's.
        return not evaluation and (outer_loop_is_full() is not False or runtime.flags.is_fully_asynchronous)

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


def _in_form(runtime: Runtime, samples: list[Sample]) -> Sample | list[Sample]:
    """Return one sample or a list, the same for every episode of this run."""
    alone = runtime.settings.history == "full" and not runtime.settings.bootstrap_on_time_limit
    return samples[0] if alone else EpisodeSamples(samples)
