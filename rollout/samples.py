"""Converts samples to train data with the turn table; makes samples of episodes, value pretraining
and evaluation."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from advantage.turn_table import PADDING_INDEX, TABLE_KEY, TurnKind, TurnRow, encode_row
from rollout.batches.metrics import count_notes
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import Sample
from rollout.bridge.roles import samples_multiple
from rollout.bridge.sample import (
    SampleWriter,
    build_samples,
    chain_sample,
    facts_of,
    flatten,
    group_of,
    later_groups,
    row_of,
    segment_samples,
    set_row,
)
from rollout.errors import ConfigError
from rollout.spec import EpisodeSpec
from rollout.tokens.token_prefix import token_prefix
from rollout.turn import FinishReason, Prompt, SampleKind, Segment, StopReason, Turn

TOP_P = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
"""Columns that replay the tokens which top-p kept."""


def failed_samples(
    writer: SampleWriter, sample: Sample, spec: EpisodeSpec, fault: str
) -> list[Sample]:
    """Put one masked token in place of an episode whose environment was lost, with every value that
    slime logs."""
    writer.make_inert(sample, group_of(sample))
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata = {
        **(sample.metadata or {}),
        "task_name": spec.name,
        "episode_id": spec.episode_id,
        "round_number": 0,
        "kind": SampleKind.FAILED,
        "stop": StopReason.FAILED,
        "fault": fault,
        "success": False,
        "episode_return": 0.0,
        "episode_turns": 0,
        "valid_turns": 0,
        "length_stops": 0,
    }
    return [sample]


def pretraining_samples(
    segments: Sequence[Segment],
    held_out: Set[int],
    group_ids: Sequence[int],
    seed: int,
    writer: SampleWriter,
) -> list[list[Sample]]:
    """Make one list of samples per chain, in random order, and mark the turns of `held_out`
    episodes."""
    shuffled = _shuffled(segments, group_ids, random.Random(f"value pretraining/{seed}"), writer)
    groups: dict[int, list[Sample]] = {}
    for segment, samples in zip(segments, build_samples(segments, shuffled, writer), strict=True):
        for sample in samples:
            row = row_of(sample)
            if (
                row is not None
                and row.kind is TurnKind.TURN
                and segment.turns[0].episode_id in held_out
            ):
                set_row(sample, replace(row, kind=TurnKind.HELD_OUT))
            groups.setdefault(group_of(sample), []).append(sample)
    return [groups[group] for group in group_ids if group in groups]


def _shuffled(
    segments: Sequence[Segment], group_ids: Sequence[int], rng: random.Random, writer: SampleWriter
) -> list[int]:
    """Give the turns their groups in a random order of chains, whose turns stay neighbours."""
    chains: list[list[int]] = []
    begin = 0
    for segment in segments:
        found = writer.chains_of(segment.turns, [0] * len(segment.turns))
        chains += [[begin + position for position in chain] for chain in found]
        begin += len(segment.turns)
    rng.shuffle(chains)
    shuffled = [0] * len(group_ids)
    for turn, group in zip((turn for chain in chains for turn in chain), group_ids, strict=True):
        shuffled[turn] = group
    return shuffled


def turns_per_sample(samples: Iterable[Sequence[Sample]]) -> float:
    """The mean number of turns of the samples that hold any."""
    rows = [row_of(sample) for sample in flatten(samples)]
    return fmean(len(row.turns) for row in rows if row is not None and row.turns)


def episode_samples(
    writer: SampleWriter, sample: Sample, segment: Segment, *, stale: int
) -> list[Sample]:
    """Return the samples of the episode that `sample` asked for.

    All are in one training group. The first `stale` turns, which were played before an abort, are
    masked.
    """
    group = group_of(sample)
    masked = [turn.without_loss() for turn in segment.turns[:stale]]
    segment = replace(segment, turns=(*masked, *segment.turns[stale:]))
    unknown = [-1] * len(segment.turns)
    samples = segment_samples(writer, segment, group, [group] * len(segment.turns), unknown)
    for part in samples:
        if facts_of(part)["kind"] is not SampleKind.BOOTSTRAP:
            _inherit(part, sample, segment)
    return samples


def _inherit(part: Sample, whole: Sample, segment: Segment) -> None:
    """Copy to a sample what it shares with the sample that slime handed out, and the episode's
    facts."""
    part.index = whole.index
    part.group_index = whole.group_index
    part.session_id = whole.session_id
    part.prompt = whole.prompt
    part.label = whole.label
    row = row_of(part)
    assert row is not None
    set_row(part, replace(row, group=-1 if whole.group_index is None else whole.group_index))
    part.reward = segment.episode_return
    played = [turn for turn in segment.turns if turn.stepped]
    part.metadata = {
        **(whole.metadata or {}),
        **part.metadata,
        "stop": segment.stop,
        "episode_return": segment.episode_return,
        "episode_turns": segment.episode_turns,
        "success": segment.turns[-1].progression >= 1.0,
        "valid_turns": sum(turn.valid for turn in played),
        "length_stops": sum(
            turn.generation.finish_reason is FinishReason.LENGTH for turn in played
        ),
        "notes_events": count_notes(played),
        "summaries": [dict(turn.summary) for turn in segment.turns if turn.summary is not None],
    }
    if segment.turns[-1].truncated:
        part.status = Sample.Status.TRUNCATED
    part.non_generation_time = sum(turn.env_s for turn in segment.turns)


def evaluation_sample(
    writer: SampleWriter, spec: EpisodeSpec, turns: Sequence[Turn], facts: Mapping[str, Any]
) -> Sample:
    """Make the sample of a held-out episode's last turn; its metadata also holds the episode's
    `facts`."""
    if turns:
        sample = chain_sample(writer, turns[-1:], 0, spec.episode_id, spec.name, [-1])
    else:
        sample = writer.new(spec.episode_id, 0, Prompt([]))
        sample.metadata = {"truncated": False}
    sample.reward = facts["return"]
    sample.metadata |= facts
    return sample


def convert_samples_to_train_data(
    args: Any, samples: Sequence[Sample | Sequence[Sample]]
) -> dict[str, Any]:
    """Return slime's train data (`--custom-convert-samples-to-train-data-path`), with the turn
    table under `prompt`.

    Every value is a list with one entry per sample. Entries with one number per token are numpy
    arrays: int32 tokens, uint8 masks, float32 log-probs. Only the logs read `rewards`. There may be
    padding; its index is `PADDING_INDEX`, its reward the mean of the others.

    Raises:
        ConfigError: a sample has no turn row, so it did not come from this project's rollouts; its
            loss mask has another length than its response; or it lacks what a flag replays in
            training, such as log-probs.
    """
    samples = flatten(samples)
    flags = RolloutFlags.read(args)
    samples = _with_padding(args, samples)
    rows = [_row(sample) for sample in samples]
    groups = [group_of(sample) for sample in samples]
    masks = [_loss_mask(sample) for sample in samples]
    trained: Counter[int] = Counter()
    for group, mask in zip(groups, masks, strict=True):
        trained[group] += sum(mask)
    rewards = [float(sample.reward or 0.0) for sample in samples]
    data = {
        "tokens": [token_prefix(sample.tokens).to_numpy() for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        # Writable, so that slime does not copy them.
        "loss_masks": [np.frombuffer(bytearray(mask), np.uint8) for mask in masks],
        TABLE_KEY: [encode_row(row) for row in rows],
        "rollout_ids": groups,
        # What slime divides the sample's loss by.
        "rollout_mask_sums": [
            _mean_length(row, mask) if later_groups(sample) else trained[group]
            for sample, row, mask, group in zip(samples, rows, masks, groups, strict=True)
        ],
    }
    return data | _optional(samples, flags)


def _with_padding(args: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Add padding: a sample for each group without one, and those that each step lacks to
    `samples_multiple`.

    The groups are those of turns that share a sample with an earlier turn. With them, slime counts
    as many groups and takes the same steps as with a sample per turn, so the order of the groups is
    kept. The others join the step's last group. Each is a separate segment.
    """
    multiple = samples_multiple(args)
    step = RolloutFlags.read(args).global_batch_size
    writer = SampleWriter(args, int(samples[0].tokens[0]))
    first = 1 + max(_row(sample).segment for sample in samples)
    empty = [group for sample in samples for group in later_groups(sample)]
    padding = [writer.padding(group, first + number) for number, group in enumerate(empty)]
    together = [*samples, *padding]
    if empty:
        together.sort(key=group_of)  # as `places_of` says
    counts = Counter(group_of(sample) for sample in together)
    groups = list(counts)
    for end in range(step, len(groups) + 1, step):
        filled = sum(counts[group] for group in groups[end - step : end])
        for _ in range(-filled % multiple):
            padding.append(writer.padding(groups[end - 1], first + len(padding)))
    mean_reward = fmean(sample.reward or 0.0 for sample in samples)
    for sample in padding:
        sample.index = PADDING_INDEX
        sample.reward = mean_reward
    return [*together, *padding[len(empty) :]]


def _mean_length(row: TurnRow, mask: Sequence[int]) -> float:
    """The mean number of trained tokens in the sample's trained turns; 0 without one.

    Divided by it, the sample counts as much as its turns do in samples of their own. It is below
    the number of trained tokens, as for no other sample; `advantage.training.losses.turn_weights`
    then lets every turn count as much.
    """
    lengths = [sum(mask[turn.start : turn.end]) for turn in row.turns]
    trained = [length for length in lengths if length]
    return fmean(trained) if trained else 0.0


def _loss_mask(sample: Sample) -> list[int]:
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if len(mask) != sample.response_length:
        raise ConfigError(
            f"sample {sample.index}: {len(mask)} mask entries for {sample.response_length} tokens"
        )
    return [0] * sample.response_length if sample.remove_sample else mask


def _row(sample: Sample) -> TurnRow:
    row = row_of(sample)
    if row is None:
        raise ConfigError(
            f"sample {sample.index} has no turn row; use this converter with "
            "--rollout-function-path rollout.fixed_turn.generate_rollout or "
            "--custom-generate-function-path rollout.generate.generate"
        )
    return row


def _optional(samples: Sequence[Sample], flags: RolloutFlags) -> dict[str, list[Any]]:
    """The columns that at least one sample has; raises ConfigError if a sample lacks what training
    replays."""
    experts = [sample.rollout_routed_experts for sample in samples]
    log_probs = [sample.rollout_log_probs for sample in samples]
    columns: dict[str, list[Any]] = {
        "rollout_log_probs": [
            None if found is None else np.array(found, np.float32) for found in log_probs
        ],
        "rollout_routed_experts": [
            None if found is None else torch.as_tensor(found) for found in experts
        ],
        "multimodal_train_inputs": [sample.multimodal_train_inputs for sample in samples],
        "teacher_log_probs": [getattr(sample, "teacher_log_probs", None) for sample in samples],
        **{
            name: [getattr(sample, name) for sample in samples]
            for name in (TOP_P if flags.rollout_top_p != 1 else ())
        },
        "round_number": [facts_of(sample).get("round_number") for sample in samples],
        "source_names": [facts_of(sample).get("task_name") for sample in samples],
    }
    needed = {
        "rollout_routed_experts": (
            flags.use_rollout_routing_replay,
            "leave --use-rollout-routing-replay out",
        ),
        TOP_P[0]: (flags.rollout_top_p != 1, "keep --rollout-top-p at 1"),
        "rollout_log_probs": (
            flags.use_rollout_logprobs,
            "leave --use-rollout-logprobs out, without policy_loss: dis",
        ),
    }
    for name, (is_needed, advice) in needed.items():
        missing = sum(value is None for value in columns.get(name, ()))
        if is_needed and missing:
            raise ConfigError(
                f"training needs {name}, but {missing} of {len(samples)} samples have none, "
                f"because the engine did not return it; use an engine that does, or {advice}"
            )
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }
