"""The samples of one whole episode, for slime's own outer loop.

slime accepts a list of samples in place of one, but still reads `response`, `status` or `reward` from it when it
collects aborted samples, hands a group out again, or filters groups. `EpisodeSamples` has these attributes for the
whole episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from rollout.bridge import tracing
from rollout.bridge.framework import Sample
from rollout.bridge.sample import (
    SampleWriter,
    bootstrap_sample,
    facts_of,
    group_number,
    mark_failed,
    mask_response,
    restart,
    set_pictures,
    set_row,
    set_start,
    turn_facts,
    turn_sample,
)
from rollout.spec import EpisodeSpec
from rollout.turn import FinishReason, SampleKind, Segment


def episode_samples(
    writer: SampleWriter, sample: Sample, segment: Segment, *, joined: bool, stale: int
) -> list[Sample]:
    """The episode that `sample` asked for.

    Args:
        joined: all turns in one sample (`history: full`), instead of one sample per turn.
        stale: number of first turns that are masked, because they were played before an abort.
    """
    group = group_number(sample)
    if joined:
        samples = [_joined(writer, sample, segment, group, stale)]
    else:
        samples = [turn_sample(writer, turn, group, group, segment.task_name) for turn in segment.turns]
        for number, part in enumerate(samples):
            _inherit(part, sample, segment)
            if number < stale:
                mask_response(part)
    if segment.bootstrap is not None:
        samples.append(bootstrap_sample(writer, segment, group, samples[-1]))
    return samples


def failed_samples(writer: SampleWriter, sample: Sample, spec: EpisodeSpec, fault: str) -> list[Sample]:
    """One masked token in place of an episode whose environment was lost; the batch keeps its size."""
    writer.make_inert(sample, group_number(sample))
    mark_failed(sample, spec, fault)
    return [sample]


def _joined(writer: SampleWriter, sample: Sample, segment: Segment, group: int, stale: int) -> Sample:
    """All turns in one sample: the model's tokens unchanged, the observations between them masked."""
    turns = segment.turns
    restart(sample, turns[0].prompt)
    spans: list[TurnSpan] = []
    for number, turn in enumerate(turns):
        gap = turn.prompt.token_ids[len(sample.tokens) :]
        if gap:
            writer.append_observation(sample, gap)
        start = sample.response_length
        writer.append_generation(sample, turn.generation)
        if number < stale:
            mask_response(sample, start)
        action = start + turn.action_span[0] if turn.action_span else -1
        spans.append(TurnSpan(start, sample.response_length, turn.reward, action))
    set_pictures(sample, turns[-1].prompt)
    last = turns[-1]
    set_row(sample, TurnRow(group, turns[0].index, TurnKind.TURN, last.terminated, last.truncated, tuple(spans)))
    sample.metadata = {**(sample.metadata or {}), **turn_facts(last), "turns": len(turns)}
    _inherit(sample, sample, segment)
    tracing.attach(sample, turns)
    return sample


def _inherit(part: Sample, whole: Sample, segment: Segment) -> None:
    """Copy to a sample what it shares with the sample that slime handed out, and the episode's facts."""
    part.index, part.group_index, part.session_id = whole.index, whole.group_index, whole.session_id
    part.label = whole.label
    set_start(part, whole.group_index)
    part.reward = segment.episode_return
    part.metadata = {
        **(whole.metadata or {}),
        **part.metadata,
        "stop": segment.stop,
        "episode_return": segment.episode_return,
        "episode_turns": segment.episode_turns,
        "success": segment.turns[-1].progression >= 1.0,
        "valid_turns": sum(turn.valid for turn in segment.turns),
        "length_stops": sum(turn.generation.finish_reason is FinishReason.LENGTH for turn in segment.turns),
    }
    if segment.turns[-1].truncated:
        part.status = Sample.Status.TRUNCATED
    part.non_generation_time = sum(turn.env_s for turn in segment.turns)


def episode_facts(samples: Iterable[Sample | Sequence[Sample]]) -> list[Mapping[str, Any]]:
    """The facts of each whole episode; empty if the samples are not of whole episodes.

    The samples of an episode share slime's index, and each has the facts of the whole episode, so one of them counts.
    """
    flat = [part for sample in samples for part in ([sample] if isinstance(sample, Sample) else sample)]
    episodes: dict[Any, Mapping[str, Any]] = {}
    for number, sample in enumerate(flat):
        facts = facts_of(sample)
        if "stop" in facts and "episode_turns" in facts:
            episodes[number if sample.index is None else sample.index] = facts
    return list(episodes.values())


def without_fillers(samples: Iterable[Sample]) -> list[Sample]:
    """The samples without bootstrap states and padding."""
    fillers = (SampleKind.BOOTSTRAP, SampleKind.PADDING)
    return [sample for sample in samples if facts_of(sample).get("kind") not in fillers]


class EpisodeSamples(list[Sample]):
    """The samples of one finished episode, with the attributes that slime reads of a single sample."""

    response = ""
    """Empty, because slime marks samples with a response as aborted midway, and this episode is over."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__(samples)
        self.metadata: dict[str, Any] = {}

    @property
    def status(self) -> Sample.Status:
        """Always completed, so slime does not play the episode again."""
        return Sample.Status.COMPLETED

    @property
    def reward(self) -> float | None:
        return self[0].reward

    def get_reward_value(self, args: Any) -> float:
        """The episode's return, which all its samples carry; slime's dynamic filters compare it."""
        return self[0].get_reward_value(args)

    @property
    def session_id(self) -> str | None:
        return self[0].session_id

    @property
    def index(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hides `list.index`, because slime's fully asynchronous loop sorts a group's members by this attribute."""
        return self[0].index

    @property
    def group_index(self) -> int | None:
        """The episode's id, under which a buffered group is saved and handed out again."""
        return self[0].group_index

    @property
    def remove_sample(self) -> bool:
        return all(sample.remove_sample for sample in self)

    @remove_sample.setter
    def remove_sample(self, removed: bool) -> None:
        """Remove every turn from the loss, as slime's sample filters do with a sample."""
        for sample in self:
            sample.remove_sample = removed

    @property
    def response_length(self) -> int:
        return sum(sample.response_length for sample in self)

    @property
    def loss_mask(self) -> list[int]:
        return [bit for sample in self for bit in sample.loss_mask or ()]

    @loss_mask.setter
    def loss_mask(self, mask: list[int]) -> None:
        """Set the masks of all turns, as slime does for samples from before an update."""
        start = 0
        for sample in self:
            sample.loss_mask = mask[start : start + sample.response_length]
            start += sample.response_length
