"""Converts samples to train data with the turn table; makes samples of episodes, value pretraining and evaluation."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from advantage.turn_table import PADDING_INDEX, TABLE_KEY, TurnKind, TurnRow, TurnSpan, encode_row
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import Sample
from rollout.bridge.roles import samples_multiple
from rollout.bridge.sample import (
    SampleWriter,
    attach_trace,
    bootstrap_sample,
    build_samples,
    facts_of,
    flatten,
    group_of,
    mask_response,
    restart,
    row_of,
    set_images,
    set_row,
    turn_facts,
    turn_sample,
)
from rollout.errors import ConfigError
from rollout.play.metrics import count_notes
from rollout.spec import EpisodeSpec
from rollout.tokens.token_prefix import token_prefix
from rollout.turn import FinishReason, Prompt, SampleKind, Segment, StopReason, Turn


def failed_samples(writer: SampleWriter, sample: Sample, spec: EpisodeSpec, fault: str) -> list[Sample]:
    """Put one masked token in place of an episode whose environment was lost, with every value that slime logs."""
    writer.make_inert(sample, group_of(sample))
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    sample.metadata = {
        **(sample.metadata or {}),
        **{"task_name": spec.name, "episode_id": spec.episode_id, "round_number": 0, "turns": 0},
        **{"kind": SampleKind.FAILED, "stop": StopReason.FAILED, "fault": fault, "success": False},
        **{"episode_return": 0.0, "episode_turns": 0, "valid_turns": 0, "length_stops": 0},
    }
    return [sample]


def pretraining_samples(
    segments: Sequence[Segment], held_out: Set[int], group_ids: Sequence[int], seed: int, writer: SampleWriter
) -> list[list[Sample]]:
    """Make one list of samples per turn, in random order; turns of `held_out` episodes are marked in the turn table."""
    shuffled = list(group_ids)
    random.Random(f"value pretraining/{seed}").shuffle(shuffled)
    groups: dict[int, list[Sample]] = {}
    for segment, samples in zip(segments, build_samples(segments, shuffled, writer), strict=True):
        for sample in samples:
            row = row_of(sample)
            if row is not None and row.kind is TurnKind.TURN and segment.turns[0].episode_id in held_out:
                set_row(sample, replace(row, kind=TurnKind.HELD_OUT))
            groups.setdefault(group_of(sample), []).append(sample)
    return [groups[group] for group in group_ids]


def episode_samples(
    writer: SampleWriter, sample: Sample, segment: Segment, *, joined: bool, stale: int
) -> list[Sample]:
    """Return the samples of the episode that `sample` asked for: one if `joined`, else one per turn.

    The first `stale` turns, which were played before an abort, are masked.
    """
    group = group_of(sample)
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


def _joined(writer: SampleWriter, sample: Sample, segment: Segment, group: int, stale: int) -> Sample:
    """Write all turns into one sample: the model's tokens unchanged, the observations between them masked."""
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
        spans.append(TurnSpan(start, sample.response_length, turn.reward, action, moves=turn.moves))
    set_images(sample, turns[-1].prompt)
    last = turns[-1]
    set_row(sample, TurnRow(group, turns[0].index, TurnKind.TURN, last.terminated, last.truncated, tuple(spans)))
    sample.metadata = {**(sample.metadata or {}), **turn_facts(last), "turns": len(turns)}
    _inherit(sample, sample, segment)
    attach_trace(sample, turns)
    return sample


def _inherit(part: Sample, whole: Sample, segment: Segment) -> None:
    """Copy to a sample what it shares with the sample that slime handed out, and the episode's facts."""
    part.index, part.group_index, part.session_id = whole.index, whole.group_index, whole.session_id
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
        "length_stops": sum(turn.generation.finish_reason is FinishReason.LENGTH for turn in played),
        "notes_events": count_notes(played),
        "summaries": [dict(turn.summary) for turn in segment.turns if turn.summary is not None],
    }
    if segment.turns[-1].truncated:
        part.status = Sample.Status.TRUNCATED
    part.non_generation_time = sum(turn.env_s for turn in segment.turns)


def evaluation_sample(
    writer: SampleWriter, spec: EpisodeSpec, turns: Sequence[Turn], facts: Mapping[str, Any]
) -> Sample:
    """Make the sample of a held-out episode's last turn; its metadata also holds the episode's `facts`."""
    if turns:
        sample = turn_sample(writer, turns[-1], 0, spec.episode_id, spec.name)
    else:
        sample = writer.new(spec.episode_id, 0, Prompt([]))
        sample.metadata = {"truncated": False}
    sample.reward = facts["return"]
    sample.metadata |= facts
    return sample


def convert_samples_to_train_data(args: Any, samples: Sequence[Sample | Sequence[Sample]]) -> dict[str, Any]:
    """Return slime's train data (`--custom-convert-samples-to-train-data-path`), with the turn table under `prompt`.

    Every value is a list with one entry per sample. Entries with one number per token are numpy arrays: int32 tokens,
    uint8 masks, float32 log-probs. Only the logs read `rewards`. Padding may follow the samples
    (`samples_multiple`); its index is `PADDING_INDEX`, its reward the mean of the others.

    Raises:
        ConfigError: a sample has no turn row, so it did not come from this project's rollouts; its loss mask has
            another length than its response; or it lacks what a flag replays in training, such as log-probs.
    """
    samples, flags = flatten(samples), RolloutFlags.read(args)
    rows = [_row(sample) for sample in samples]
    padding = _padding(args, samples, 1 + max(row.segment for row in rows))
    samples += padding
    rows += [_row(sample) for sample in padding]
    groups = [group_of(sample) for sample in samples]
    masks = [_loss_mask(sample) for sample in samples]
    trained: Counter[int] = Counter()
    for group, mask in zip(groups, masks, strict=True):
        trained[group] += sum(mask)
    rewards = [float(sample.reward or 0.0) for sample in samples]
    data: dict[str, Any] = {
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
        "rollout_mask_sums": [trained[group] for group in groups],
    }
    _add_optional(data, samples, flags)
    _check_replay(data, flags)
    return data


def _padding(args: Any, samples: Sequence[Sample], segment: int) -> list[Sample]:
    """Make the samples that each optimizer step lacks to a multiple of `samples_multiple`.

    They join the step's last group, so slime counts as many groups and takes the same steps as without them. Each is a
    separate segment, from number `segment` on.
    """
    multiple, step = samples_multiple(args), RolloutFlags.read(args).global_batch_size
    writer = SampleWriter(args, int(samples[0].tokens[0]))
    counts = Counter(group_of(sample) for sample in samples)
    groups = list(counts)
    padding: list[Sample] = []
    for end in range(step, len(groups) + 1, step):
        filled = sum(counts[group] for group in groups[end - step : end])
        for _ in range(-filled % multiple):
            padding.append(writer.padding(groups[end - 1], segment + len(padding)))
    mean_reward = fmean(sample.reward or 0.0 for sample in samples)
    for sample in padding:
        sample.index, sample.reward = PADDING_INDEX, mean_reward
    return padding


def _loss_mask(sample: Sample) -> list[int]:
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if len(mask) != sample.response_length:
        raise ConfigError(f"sample {sample.index}: {len(mask)} mask entries for {sample.response_length} tokens")
    return [0] * sample.response_length if sample.remove_sample else mask


def _row(sample: Sample) -> TurnRow:
    row = row_of(sample)
    if row is None:
        raise ConfigError(
            f"sample {sample.index} has no turn row; use this converter with --rollout-function-path "
            "rollout.fixed_turn.generate_rollout or --custom-generate-function-path rollout.generate.generate"
        )
    return row


def _add_optional(data: dict[str, Any], samples: list[Sample], flags: RolloutFlags) -> None:
    """Add the columns that at least one sample has."""
    names = ["rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "teacher_log_probs"]
    names += ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"] if flags.rollout_top_p != 1.0 else []
    columns = {name: [getattr(sample, name, None) for sample in samples] for name in names}
    for name, convert in ((names[0], lambda x: np.array(x, np.float32)), (names[1], torch.as_tensor)):
        columns[name] = [None if value is None else convert(value) for value in columns[name]]
    for name, fact in (("round_number", "round_number"), ("source_names", "task_name")):
        columns[name] = [facts_of(sample).get(fact) for sample in samples]
    data |= {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _check_replay(data: Mapping[str, Any], flags: RolloutFlags) -> None:
    wanted = {
        "rollout_routed_experts": (flags.use_rollout_routing_replay, "leave --use-rollout-routing-replay out"),
        "rollout_top_p_token_ids": (flags.rollout_top_p != 1.0, "keep --rollout-top-p at 1"),
        "rollout_log_probs": (flags.use_rollout_logprobs, "leave --use-rollout-logprobs out, without policy_loss: dis"),
    }
    for key, (is_wanted, advice) in wanted.items():
        values = data.get(key, [None])
        if is_wanted and any(value is None for value in values):
            missing = sum(value is None for value in values)
            raise ConfigError(
                f"training needs {key}, but {missing} of {len(values)} samples have none, because the engine did not "
                f"return it; use an engine that does, or {advice}"
            )
