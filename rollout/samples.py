"""From turns to slime's samples, and from samples to train data with the turn table.

Invariants: one sample a turn, in a training group of its own; a bootstrap sample shares the group of its
segment's last turn, carries one dummy token and no loss; what the model produced is trained on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from advantage.turn_table import TABLE_KEY, TurnKind, TurnRow, TurnSpan, anchor_of, encode_row
from rollout.bridge.framework import Sample, group_of, set_group, train_data_keys
from rollout.bridge.routing_replay import fill_replay, fill_top_p, keep_routing
from rollout.errors import ConfigError
from rollout.turn import Prompt, Turn

ROW_KEY = "turn_row"
"""Key of `sample.train_metadata` that holds the sample's row of the turn table."""


@dataclass(frozen=True)
class Segment:
    """An episode's turns inside one batch. `bootstrap` is the next prompt where the batch cut the episode."""

    task_name: str
    turns: tuple[Turn, ...]
    bootstrap: Prompt | None
    stop: str
    """`terminated`, `time_limit`, `max_turns`, `context`, `encoding`, `failed` or `cut`."""
    episode_return: float = 0.0
    """Sum of the episode's rewards so far, earlier batches included."""
    episode_turns: int = 0
    """Number of the episode's turns so far, earlier batches included."""

    @property
    def finished(self) -> bool:
        """Whether the episode ended on its own terms, rather than by the batch or a fault."""
        return self.stop not in ("cut", "failed")


def build_samples(
    segments: Sequence[Segment], group_ids: Sequence[int], args: Any, dummy_token: int
) -> list[list[Sample]]:
    """One list of samples a segment: its turns in order, then the bootstrap sample if it was cut.

    `group_ids` has one id a turn, in the order of the segments.
    """
    ids = iter(group_ids)
    groups = []
    for number, segment in enumerate(segments):
        samples = [turn_sample(turn, number, next(ids), args, segment.task_name) for turn in segment.turns]
        if segment.bootstrap is not None:
            samples.append(bootstrap_sample(segment, number, samples[-1], args, dummy_token))
        groups.append(samples)
    return groups


def turn_sample(turn: Turn, segment: int, group: int, args: Any, task_name: str) -> Sample:
    """One turn as one sample: prompt tokens, then the model's own tokens, trained on unless they were altered."""
    sample = _empty_sample(group, segment, turn.prompt)
    sample.prompt = ""
    append_generation(sample, turn, args)
    sample.reward, sample.session_id = turn.reward, session_of(turn.episode_id)
    sample.metadata = {"task_name": task_name, "episode_id": turn.episode_id, **turn_facts(turn)}
    action = turn.action_span[0] if turn.action_span else -1
    span = TurnSpan(0, len(turn.generation.token_ids), turn.reward, action, anchor_of(turn.prompt.token_ids))
    row = TurnRow(segment, turn.index, TurnKind.TURN, turn.terminated, turn.truncated, (span,))
    sample.train_metadata = {ROW_KEY: encode_row(row).tolist()}
    return sample


def append_generation(sample: Sample, turn: Turn, args: Any) -> None:
    """Append the model's tokens; slime's own methods keep its bookkeeping (routing, top-p, speculation, caching)."""
    generation = turn.generation
    append = getattr(sample, "append_response_tokens", None)
    if append is not None:
        append(
            args,
            tokens=generation.token_ids,
            log_probs=generation.log_probs if generation.trained else None,
            trainable=generation.trained,
            meta_info=dict(generation.meta_info),
            text=generation.text,
        )
        if not generation.trained:
            fill_top_p(sample, args)
        return
    sample.tokens = sample.tokens + generation.token_ids
    sample.response += generation.text
    sample.response_length += len(generation.token_ids)
    sample.loss_mask = (sample.loss_mask or []) + [int(generation.trained)] * len(generation.token_ids)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + generation.log_probs
    update = getattr(sample, "update_from_meta_info", None)
    if update is not None:
        update(args, {**generation.meta_info, "finish_reason": {"type": generation.finish_reason}})
        keep_routing(sample, generation.meta_info, args)
        return
    sample.weight_versions = [*sample.weight_versions, *generation.weight_versions]
    cut = generation.finish_reason == "length"
    sample.status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED


def append_observation(sample: Sample, token_ids: list[int], args: Any) -> None:
    """Append tokens between two answers: part of the response, masked from the loss."""
    append = getattr(sample, "append_response_tokens", None)
    if append is not None:
        append(args, tokens=token_ids, trainable=False)
        return
    sample.tokens = sample.tokens + token_ids
    sample.response_length += len(token_ids)
    sample.loss_mask = (sample.loss_mask or []) + [0] * len(token_ids)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + [0.0] * len(token_ids)


def turn_facts(turn: Turn) -> dict[str, Any]:
    """What the metrics and the trajectory viewer read of a turn."""
    return {
        "round_number": turn.index,
        "kind": "turn",
        "action": turn.action,
        "valid_action": turn.valid,
        "executed_action": turn.executed_action,
        "reward": turn.reward,
        "terminated": turn.terminated,
        "truncated": turn.truncated,
        "progression": turn.progression,
        "finish_reason": turn.generation.finish_reason,
        "mixed_weights": len(set(turn.generation.weight_versions)) > 1,
        "env_metrics": dict(turn.metrics),
        "engine_s": turn.engine_s,
        "env_s": turn.env_s,
    }


def session_of(episode_id: int) -> str:
    """The session, and so the router's key, of a fixed-turn episode."""
    return f"episode-{episode_id}"


def bootstrap_sample(segment: Segment, number: int, last: Sample, args: Any, dummy_token: int) -> Sample:
    """The state after the cut: the next prompt, one token that nobody generated, no loss."""
    assert segment.bootstrap is not None
    turn = segment.turns[-1]
    group = group_of(last)
    sample = _empty_sample(group if group is not None else 0, number, segment.bootstrap)
    sample.tokens = [*sample.tokens, dummy_token]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
    fill_replay(sample, args)
    sample.metadata = {
        "task_name": segment.task_name,
        "episode_id": turn.episode_id,
        "kind": "bootstrap",
        "round_number": turn.index + 1,
    }
    row = TurnRow(number, turn.index + 1, TurnKind.BOOTSTRAP)
    sample.train_metadata = {ROW_KEY: encode_row(row).tolist()}
    return sample


def inert_sample(index: int, segment: int, args: Any, dummy_token: int) -> Sample:
    """Two tokens and no loss, as an episode of its own: keeps the shape of a batch and trains nothing."""
    sample = Sample()
    sample.index, sample.group_index = index, segment
    set_group(sample, index)
    make_inert(sample, segment, args, dummy_token)
    sample.status, sample.metadata = Sample.Status.COMPLETED, {"kind": "padding", "round_number": 0}
    return sample


def make_inert(sample: Sample, segment: int, args: Any, dummy_token: int) -> None:
    """Replace what the sample holds by one masked token."""
    sample.tokens, sample.response, sample.response_length = [dummy_token, dummy_token], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.reward = [0], [0.0], 0.0
    fill_replay(sample, args)
    row = TurnRow(segment, 0, TurnKind.TURN, True, False, (TurnSpan(0, 1, 0.0),))
    sample.train_metadata = {**(sample.train_metadata or {}), ROW_KEY: encode_row(row).tolist()}


def fill_steps(groups: list[list[Sample]], step: int, args: Any, dummy_token: int) -> list[list[Sample]]:
    """Inert samples spread among the groups until the samples make whole steps.

    For frameworks that count samples and cut off what is left of the last step: miles.
    """
    total = sum(len(group) for group in groups)
    missing = -total % step
    index = 1 + max(sample.index for group in groups for sample in group)
    padded = list(groups)
    for k in reversed(range(missing)):
        place = (k + 1) * len(groups) // (missing + 1)
        padded.insert(place, [inert_sample(index + k, len(groups) + k, args, dummy_token)])
    return padded


def _empty_sample(group: int, group_index: int, prompt: Prompt) -> Sample:
    sample = Sample()
    sample.index = group
    sample.group_index = group_index
    set_group(sample, group)
    sample.tokens = list(prompt.token_ids)
    sample.loss_mask, sample.rollout_log_probs = [], []
    if prompt.train_inputs is not None:
        sample.multimodal_train_inputs = dict(prompt.train_inputs)
    return sample


def convert_samples_to_train_data(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """slime's `--custom-convert-samples-to-train-data-path`: its keys, and the turn table under `prompt`.

    Every value is a list with one entry a sample. `rewards` are per sample for the logs; training reads the
    rewards of the turn table.

    Raises:
        ConfigError: a sample has no turn row, so it did not come from this project's rollouts.
    """
    if samples and isinstance(samples[0], list):
        samples = [sample for group in samples for sample in group]
    masks = [_loss_mask(sample) for sample in samples]
    rewards = [float(sample.reward or 0.0) for sample in samples]
    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": masks,
        TABLE_KEY: [_row(sample) for sample in samples],
    }
    _add_groups(data, samples, masks)
    _add_optional(data, samples, args)
    return data


def _loss_mask(sample: Sample) -> list[int]:
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if len(mask) != sample.response_length:
        raise ConfigError(f"sample {sample.index}: {len(mask)} mask entries for {sample.response_length} tokens")
    return [0] * sample.response_length if sample.remove_sample else mask


def _row(sample: Sample) -> torch.Tensor:
    row = (sample.train_metadata or {}).get(ROW_KEY)
    if row is None:
        raise ConfigError(
            f"sample {sample.index} has no turn row; use this converter with --rollout-function-path "
            "rollout.fixed_turn.generate_rollout or --custom-generate-function-path rollout.generate.generate"
        )
    return torch.tensor(row, dtype=torch.float64)


def _add_groups(data: dict[str, Any], samples: list[Sample], masks: list[list[int]]) -> None:
    """Group ids, and each group's total of trained tokens, which slime's loss reducer divides by."""
    keys = train_data_keys()
    if keys is None:
        return
    ids = [group_of(sample) for sample in samples]
    totals: dict[Any, int] = {}
    for group, mask in zip(ids, masks, strict=True):
        totals[group] = totals.get(group, 0) + sum(mask)
    data[keys[0]] = ids
    data[keys[1]] = [totals[group] for group in ids]


def _add_optional(data: dict[str, Any], samples: list[Sample], args: Any) -> None:
    """Keys that slime adds only where the samples have them."""

    def column(key: str, read: Callable[[Sample], Any]) -> None:
        values = [read(sample) for sample in samples]
        if any(value is not None for value in values):
            data[key] = values

    for key in ("rollout_log_probs", "multimodal_train_inputs", "teacher_log_probs"):
        column(key, lambda s, key=key: getattr(s, key, None))
    column("round_number", lambda s: (s.metadata or {}).get("round_number"))
    column("source_names", lambda s: (s.metadata or {}).get("task_name"))
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        column("rollout_top_p_token_ids", lambda s: getattr(s, "rollout_top_p_token_ids", None))
        column("rollout_top_p_token_offsets", lambda s: getattr(s, "rollout_top_p_token_offsets", None))
    column("rollout_routed_experts", lambda s: _tensor(getattr(s, "rollout_routed_experts", None)))
    _check_replay(data, args)


def _check_replay(data: Mapping[str, Any], args: Any) -> None:
    """What training replays must be there for every sample.

    Raises:
        ConfigError: the engine did not return it; names the engine's flag.
    """
    wanted = {"rollout_routed_experts": getattr(args, "use_rollout_routing_replay", False)}
    wanted["rollout_top_p_token_ids"] = getattr(args, "rollout_top_p", 1.0) != 1.0
    for key, is_wanted in wanted.items():
        values = data.get(key, [None])
        if is_wanted and any(value is None for value in values):
            missing = sum(value is None for value in values)
            raise ConfigError(
                f"training replays {key}, but {missing} of {len(values)} samples have none: this engine does not "
                "return it; leave --use-rollout-routing-replay out, or keep --rollout-top-p at 1"
            )


def _tensor(value: Any) -> torch.Tensor | None:
    return None if value is None else torch.as_tensor(value)
