"""Reads and writes the fields of slime's `Sample`, and makes a batch's samples from its turns.

Each turn is one sample in its own training group. A bootstrap sample shares the group of its segment's last turn.
Of the other files, only `rollout/samples.py` names fields of a `Sample`.
"""

import importlib
import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch

from advantage.turn_table import TurnKind, TurnRow, TurnSpan, anchor_of
from rollout.bridge.framework import HAS_SLIME, Sample
from rollout.spec import EnvSpec, EpisodeSpec, session_of
from rollout.tokens.token_prefix import token_prefix
from rollout.turn import ENGINE, Generation, Prompt, SampleKind, Segment, Span, Turn

ROW_KEY = "turn_row"
"""Key of `sample.train_metadata` that holds the sample's `TurnRow` until the converter encodes it."""


class SampleWriter:
    """Makes and fills samples for one run; `dummy_token` is the untrained response of bootstrap and inert ones."""

    def __init__(self, args: Any, dummy_token: int) -> None:
        self._args = args
        self.dummy_token = dummy_token

    def new(self, training_group: int, segment: int, prompt: Prompt) -> Sample:
        """A sample that ends with the prompt's tokens and has no response yet."""
        sample = Sample()
        sample.index, sample.group_index, sample.prompt = training_group, segment, ""
        set_group(sample, training_group)
        restart(sample, prompt)
        set_images(sample, prompt)
        return sample

    def append_generation(self, sample: Sample, generation: Generation) -> None:
        """Append the model's tokens; slime updates its own records (routing, top-p, speculation, caching)."""
        trained = generation.trained
        meta_info = dict(generation.meta_info)
        if self._keeps_top_p:
            sample.append_response_tokens(
                self._args,
                tokens=list(generation.token_ids),
                log_probs=list(generation.log_probs) if trained else None,
                trainable=trained,
                meta_info=meta_info,
                text=generation.text,
            )
            if not trained and sample.rollout_top_p_token_offsets is None:
                self._fill_top_p(sample)
            return
        self._append(sample, generation.token_ids, generation.log_probs if trained else None)
        # Without tokens, slime only updates its records; given tokens, it would turn all of them into lists.
        sample.append_response_tokens(self._args, meta_info=meta_info, text=generation.text)

    def append_observation(self, sample: Sample, token_ids: Sequence[int]) -> None:
        """Append the tokens between two answers: part of the response, masked from the loss."""
        if self._keeps_top_p:
            sample.append_response_tokens(self._args, tokens=list(token_ids), trainable=False)
        else:
            self._append(sample, token_ids, None)

    def append_dummy(self, sample: Sample) -> None:
        """Append one masked token, at which the critic computes the value of the prompt."""
        self._append(sample, [self.dummy_token], None)
        sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
        self.fill_replay(sample)

    def make_inert(self, sample: Sample, segment: int) -> None:
        """Replace the sample's content by one masked token, as a separate episode without loss."""
        restart(sample, Prompt([self.dummy_token]))
        self.append_dummy(sample)
        set_row(sample, TurnRow(segment, 0, TurnKind.TURN, True, False, (TurnSpan(0, 1, 0.0),)))

    def padding(self, training_group: int, segment: int) -> Sample:
        """A sample of two tokens that only fills an optimizer step: it has no loss, and its value is not used."""
        sample = self.new(training_group, segment, Prompt([self.dummy_token]))
        self.append_dummy(sample)
        sample.metadata = {"kind": SampleKind.PADDING, "task_name": SampleKind.PADDING, "round_number": 0}
        set_row(sample, TurnRow(segment, 0, TurnKind.BOOTSTRAP))
        return sample

    @property
    def _keeps_top_p(self) -> bool:
        """Whether slime keeps the kept tokens of top-p sampling, which it does only while it appends tokens."""
        return getattr(self._args, "rollout_top_p", 1.0) != 1.0

    def _append(self, sample: Sample, ids: Sequence[int], log_probs: Sequence[float] | None) -> None:
        """Append tokens, masked without log-probs; slime declares lists, but other sequences work."""
        compact = cast(Any, sample)
        compact.tokens = token_prefix(sample.tokens).extended(ids)
        sample.response_length += len(ids)
        # A list, because slime sums it up, and sums of numpy's uint8 overflow.
        sample.loss_mask = (sample.loss_mask or []) + [int(log_probs is not None)] * len(ids)
        new = array("f", bytes(4 * len(ids)) if log_probs is None else log_probs)
        compact.rollout_log_probs = array("f", sample.rollout_log_probs or ()) + new

    def fill_replay(self, sample: Sample) -> None:
        """Add placeholders for what training replays (top-p's kept tokens, routed experts) to a masked sample."""
        self._fill_top_p(sample)
        if getattr(self._args, "use_rollout_routing_replay", False):
            experts = torch.arange(self._args.moe_router_topk, dtype=torch.int32)
            shape = (len(sample.tokens) - 1, self._args.num_layers, -1)
            sample.rollout_routed_experts = experts.expand(*shape).numpy().copy()

    def _fill_top_p(self, sample: Sample) -> None:
        if self._keeps_top_p:
            sample.rollout_top_p_token_ids = []
            sample.rollout_top_p_token_offsets = [0] * (sample.response_length + 1)


def build_samples(
    segments: Sequence[Segment], group_ids: Sequence[int], writer: SampleWriter, staleness: Sequence[int] | None = None
) -> list[list[Sample]]:
    """Return the samples of each segment: its turns in order, then its bootstrap sample, if any.

    `group_ids` and `staleness` have one entry per turn, in the order of the segments.
    """
    ids = iter(group_ids)
    stale = iter(staleness if staleness is not None else [-1] * len(group_ids))
    groups: list[list[Sample]] = []
    for number, segment in enumerate(segments):
        samples = [
            turn_sample(writer, turn, number, next(ids), segment.task_name, next(stale)) for turn in segment.turns
        ]
        if segment.bootstrap is not None:
            samples.append(bootstrap_sample(writer, segment, number, samples[-1]))
        groups.append(samples)
    return groups


def turn_sample(
    writer: SampleWriter, turn: Turn, segment: int, group: int, task_name: str, staleness: int = -1
) -> Sample:
    """Make a turn's sample: the prompt's tokens, then the model's, which are trained on unless they were altered.

    Args:
        segment: id that the samples of one segment share in the batch, and no others.
        group: id of the sample's training group.
        staleness: actor updates between playing and training the turn; -1 if they are not known.
    """
    sample = writer.new(group, segment, turn.prompt)
    writer.append_generation(sample, turn.generation)
    sample.reward, sample.session_id = turn.reward, session_of(turn.episode_id)
    sample.metadata = {"task_name": task_name, "episode_id": turn.episode_id, **turn_facts(turn)}
    action = turn.action_span[0] if turn.action_span else -1
    anchor = anchor_of(token_prefix(turn.prompt.token_ids).to_numpy()) if turn.stepped else -1
    span = TurnSpan(0, len(turn.generation.token_ids), turn.reward, action, anchor, staleness, turn.moves)
    set_row(sample, TurnRow(segment, turn.index, TurnKind.TURN, turn.terminated, turn.truncated, (span,)))
    attach_trace(sample, [turn])
    return sample


_FACTS = ("action", "executed_action", "reward", "terminated", "truncated", "progression", "engine_s", "env_s")


def turn_facts(turn: Turn) -> dict[str, Any]:
    """Collect the values of a turn that the metrics and the trajectory viewer read."""
    return {
        **{"round_number": turn.index, "kind": SampleKind.TURN, "valid_action": turn.valid},
        **{name: getattr(turn, name) for name in _FACTS},
        "finish_reason": turn.generation.finish_reason,
        "mixed_weights": len(set(turn.generation.weight_versions)) > 1,
        "env_metrics": dict(turn.metrics),
        **({} if turn.notes is None else {"notes": turn.notes}),
        **({} if turn.summary is None else {"summary": dict(turn.summary)}),
    }


def bootstrap_sample(writer: SampleWriter, segment: Segment, number: int, last: Sample) -> Sample:
    """Make the sample of the state after the last turn: its prompt and one dummy token, without loss."""
    assert segment.bootstrap is not None
    turn = segment.turns[-1]
    sample = writer.new(group_of(last), number, segment.bootstrap)
    writer.append_dummy(sample)
    sample.metadata = {
        "task_name": segment.task_name,
        "episode_id": turn.episode_id,
        "kind": SampleKind.BOOTSTRAP,
        "round_number": turn.index + 1,
    }
    set_row(sample, TurnRow(number, turn.index + 1, TurnKind.BOOTSTRAP))
    return sample


def restart(sample: Sample, prompt: Prompt) -> None:
    """Set the sample's tokens to the prompt's, with an empty response."""
    cast(Any, sample).tokens = token_prefix(prompt.token_ids)
    sample.response, sample.response_length = "", 0
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [], [], []
    sample.remove_sample = False


def set_images(sample: Sample, prompt: Prompt) -> None:
    """Set the prompt's images as the model's forward pass takes them."""
    sample.multimodal_train_inputs = dict(prompt.train_inputs) if prompt.train_inputs is not None else None


def set_group(sample: Sample, group: int) -> None:
    """Put the sample into the training group `group`."""
    sample.rollout_id = group


def group_of(sample: Sample) -> int:
    """The sample's training group; without one, its index, which may be 0."""
    group = sample.index if sample.rollout_id is None else sample.rollout_id
    return group or 0


def set_row(sample: Sample, row: TurnRow) -> None:
    """Attach the sample's row of the turn table."""
    sample.train_metadata = {**(sample.train_metadata or {}), ROW_KEY: row}


def row_of(sample: Sample) -> TurnRow | None:
    """The sample's row of the turn table; None if another rollout made the sample."""
    return (sample.train_metadata or {}).get(ROW_KEY)


def mask_response(sample: Sample, start: int = 0) -> None:
    """Mask the response from offset `start` on."""
    kept = (sample.loss_mask or [])[:start]
    sample.loss_mask = kept + [0] * (sample.response_length - start)


def handout(spec: EpisodeSpec, index: int) -> Sample:
    """A sample that slime's outer loop hands to `rollout.generate`, with the episode to play."""
    sample = Sample()
    sample.group_index, sample.index = spec.episode_id, index
    sample.metadata = {
        **spec.env.metadata,
        "task_name": spec.name,
        "env_path": spec.env.env_path,
        "env_options": dict(spec.env.options),
        "episode_id": spec.episode_id,
    }
    set_group(sample, index)
    return sample


def flatten(samples: Iterable[Sample | Sequence[Sample]]) -> list[Sample]:
    """List single samples and the samples of groups in one list."""
    return [part for sample in samples for part in ([sample] if isinstance(sample, Sample) else sample)]


def facts_of(sample: Sample) -> Mapping[str, Any]:
    """What the rollout recorded of the sample's turn or episode: its kind, task, outcome and stop reason."""
    return sample.metadata or {}


def episode_id_of(sample: Sample) -> int:
    """The id of the episode that `handout` put into the sample."""
    assert sample.group_index is not None
    return sample.group_index


def episode_spec(sample: Sample, env_path: str, options: Mapping[str, Any], max_turns: int | None) -> EpisodeSpec:
    """The episode that a sample's metadata names; `env_path` and `options` are defaults."""
    metadata = dict(sample.metadata or {})
    env = EnvSpec(
        env_path=metadata.get("env_path", env_path),
        metadata=metadata,
        options=metadata.get("env_options", options),
        label=sample.label,
        prompt=sample.prompt or None,
        multimodal_inputs=sample.multimodal_inputs,
        max_turns=max_turns,
    )
    name = metadata.get("task_name") or str(metadata.get("task", env_path))
    return EpisodeSpec(sample.index or 0, name, env, sample.session_id)


def mark_aborted(sample: Sample) -> Sample:
    """Mark the sample as stopped by slime's outer loop, which may hand it out again."""
    sample.status = Sample.Status.ABORTED
    return sample


def is_traced(args: Any) -> bool:
    """Whether turns record where their time goes, as spans that slime saves with `--save-debug-rollout-data`."""
    return HAS_SLIME and getattr(args, "save_debug_rollout_data", None) is not None


@cache
def _tracing() -> Any:
    """slime's module for traces, where main or v0.3.1 has it."""
    try:
        return importlib.import_module("slime.observability.trace_utils")
    except ModuleNotFoundError:
        return importlib.import_module("slime.utils.trace_utils")


def attach_trace(sample: Sample, turns: Iterable[Turn]) -> None:
    """Add the turns' spans to the sample's trace; does nothing for turns without spans."""
    traced = [turn for turn in turns if turn.spans]
    if not traced:
        return
    tracing = _tracing()
    handle = tracing.bind_trace(sample)
    for turn in traced:
        facts = {"episode_id": turn.episode_id, "turn": turn.index, "reward": turn.reward, "valid": turn.valid}
        whole = Span("turn", turn.spans[0].start_s, turn.spans[-1].end_s, facts, turn.spans)
        _add(tracing, handle, whole, None)


def _add(tracing: Any, handle: Any, span: Span, parent: str | None) -> None:
    """Append the events of a span and of those inside it, as `trace_span` does while time passes."""
    number = uuid.uuid4().hex
    event = {"name": span.name, "span_id": number, "attempt": handle.attempt}
    event |= {name: getattr(handle, name) for name in ("trace_id", "sample_id", "group_id")}
    start = {**event, "type": "span_start", "ts": span.start_s}
    handle.carrier["events"].append(start if parent is None else {**start, "parent_span_id": parent})
    for inner in span.inside:
        _add(tracing, handle, inner, number)
    facts: Mapping[str, Any] | None = span.facts
    if span.name == ENGINE:
        context = tracing.TraceSpanContext(handle, [handle], [(handle, number)], span.start_s)
        facts = context.update(tracing.build_sglang_meta_trace_attrs(dict(span.facts))).build_end_attrs()
    end = {**event, "type": "span_end", "ts": span.end_s}
    handle.carrier["events"].append({**end, "attrs": dict(facts)} if facts else end)
