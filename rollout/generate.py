"""One whole episode inside slime's own outer loop (`--custom-generate-function-path`).

An aborted episode keeps its environment and continues when slime hands its sample out again. With
`--mask-offpolicy-in-partial-rollout`, the turns played before the abort are not trained. If an
episode makes several samples, all belong to the training group of the sample that slime handed out.
Every episode of a run returns the same form, a sample or a list, because slime decides by the first
one.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.batches.branches import with_baselines
from rollout.bridge.framework import Sample, outer_loop_is_full
from rollout.bridge.handout import episode_spec, mark_aborted
from rollout.bridge.whole_episodes import EpisodeSamples
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, start_episode
from rollout.play.loop import Slot, play
from rollout.play.parts import Runtime
from rollout.play.runtime import get_runtime
from rollout.samples import episode_samples, failed_samples
from rollout.spec import Replay
from rollout.turn import FinishReason, Generation, Segment, Turn

logger = logging.getLogger(__name__)


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode that `sample.metadata` names (`task`, `seed`) to its end.

    Returns one sample (`history: full`), or a list (`history: window`, `samples: turns`, or notes).
    An evaluation returns the last sample alone, because slime takes the mean over samples. Every
    sample's reward is the episode's return. Its status is COMPLETED, TRUNCATED after a limit, or
    FAILED with everything masked: the environment was lost or could not start, for example because
    the metadata name no task and seed, or its first prompt does not fit. A single ABORTED sample
    was stopped by slime's loop, and continues when slime hands it out again.

    Raises:
        ConfigError: a setting or flag is invalid, or the checkpoint has no tokenizer.
        EncodingError: the chat template does not support `history`, or does not show the
            environment's tools.
        EngineError: the engine refused a request, or did not answer within the allowed retries.
        MissingDependencyError: `env_backend` is `ray`, and Ray is not installed.
    """
    runtime = await get_runtime(args)
    settings = runtime.settings
    flags = runtime.flags
    spec = episode_spec(
        sample, settings.rollout_interaction_env_path, settings.env, settings.max_turns
    )
    kept = parked_episodes(runtime)
    parked = kept.take(sample)
    whole = WholeEpisode(runtime, sampling_params, evaluation, parked.turns if parked else [])
    stale = len(whole.turns) if flags.mask_offpolicy_in_partial_rollout else 0
    longest = sampling_params.get("max_new_tokens") if evaluation else None
    slot = Slot(
        lambda _: start_episode(runtime, spec, longest), episode=parked.episode if parked else None
    )
    try:
        await whole.play(slot)
        if whole.ended is None:
            comes_back = flags.partial_rollout or flags.is_fully_asynchronous
            if comes_back and (paused := slot.release()) is not None:
                await kept.park(Parked(sample, paused, whole.turns), flags.max_begun_samples)
            return mark_aborted(sample)
    finally:
        await slot.leave()
    if (
        settings.group_estimator == "branches"
        and not evaluation
        and isinstance(whole.ended, Segment)
    ):
        try:
            whole.ended = await with_baselines(
                runtime, spec, whole.ended, whole.played, sampling_params
            )
        except EnvironmentFault as fault:
            whole.ended = fault
    if isinstance(whole.ended, EnvironmentFault):
        runtime.counters["episodes_failed"] += 1
        return _in_form(runtime, failed_samples(runtime.samples, sample, spec, str(whole.ended)))
    ended = replace(whole.ended, turns=runtime.trainable(whole.ended.turns))
    segment = replace(ended, bootstrap=None) if evaluation else ended
    samples = episode_samples(runtime.samples, sample, segment, stale=stale)
    return _in_form(runtime, samples[-1:] if evaluation else samples)


class WholeEpisode:
    """Collects the turns of one episode until it ends or the outer loop has enough."""

    def __init__(
        self, runtime: Runtime, params: Mapping[str, Any], evaluation: bool, turns: list[Turn]
    ) -> None:
        """`turns` are those that were played before it was aborted."""
        self.turns = turns
        self.ended: Segment | EnvironmentFault | None = None
        """The episode or its fault; None while it goes on, and if the outer loop aborted it."""
        self.played = Replay()
        self._runtime = runtime
        self._params = params
        self._evaluation = evaluation

    async def play(self, slot: Slot) -> None:
        """Play to the end."""
        try:
            # Before the first question whether slime has enough, because this may take long.
            await slot.live()
        except EnvironmentFault as fault:
            self.ended = fault
        await play(slot, self)

    async def may_issue(self, slot: Slot) -> bool:
        """Whether the episode goes on, and slime wants more."""
        return self.ended is None and (self._evaluation or not outer_loop_is_full())

    async def ask(self, slot: Slot, episode: Episode) -> Generation | None:
        """Return the response; None if slime aborted it."""
        generation = await episode.generate(self._params, self._gives_up)
        return None if generation.finish_reason is FinishReason.ABORT else generation

    def _gives_up(self) -> bool:
        # Under slime's own loop, every other abort is the engine's.
        if self._evaluation:
            return False
        return outer_loop_is_full() is not False or self._runtime.flags.is_fully_asynchronous

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Keep the turn."""
        self.turns.append(turn)
        if episode.stop is not None:
            self.ended = episode.segment(self.turns, episode.stop)
            self.played = Replay(episode.answers, episode.stepped, episode.digests)

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        """End the episode with its fault."""
        self.ended = fault


@dataclass(frozen=True)
class Parked:
    """A live episode, its turns so far, and the sample that it plays for."""

    sample: Sample
    episode: Episode
    turns: list[Turn]


@dataclass
class ParkedEpisodes:
    """Parked episodes, oldest first, by their samples' identity, since indices repeat in an
    evaluation."""

    dropped: int = 0
    """Episodes closed for lack of room; each starts from the beginning when its sample is handed
    out again."""
    _parked: dict[int, Parked] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._parked)

    def take(self, sample: Sample) -> Parked | None:
        """Remove and return the sample's episode; None if it is not parked."""
        return self._parked.pop(id(sample), None)

    async def park(self, parked: Parked, most: int) -> None:
        """Park the episode; close the oldest ones if there are more than `most`."""
        self._parked[id(parked.sample)] = parked
        while len(self._parked) > most:
            oldest = self._parked.pop(next(iter(self._parked)))
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    "more than %d aborted episodes wait to continue; the oldest ones are closed",
                    most,
                )
            await oldest.episode.close()

    async def close(self) -> None:
        """Close all of them."""
        while self._parked:
            await self._parked.popitem()[1].episode.close()


def parked_episodes(runtime: Runtime) -> ParkedEpisodes:
    """The aborted episodes of the run."""
    if runtime.parked is None:
        runtime.parked = ParkedEpisodes()
    assert isinstance(runtime.parked, ParkedEpisodes)
    return runtime.parked


def _in_form(runtime: Runtime, samples: list[Sample]) -> Sample | list[Sample]:
    """Return one sample or a list, the same for every episode of this run."""
    return samples[0] if runtime.settings.joins_episodes else EpisodeSamples(samples)
