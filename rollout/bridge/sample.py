"""Reads and writes the fields of slime's `Sample`, and makes a batch's samples from its turns.

Each turn has a training group of its own. A sample holds one turn, or the turns of a chain
(`rollout/bridge/chains.py`) as far as they are in the same optimizer step. It is in the group of
its first turn; the converter gives each of the others a sample of padding, so that slime counts as
many groups, and takes the same steps, as with a sample per turn. A bootstrap sample shares the
group of its segment's last turn. Of the other files, only `rollout/samples.py` names fields of a
`Sample`.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from advantage.turn_table import TurnKind, TurnRow, TurnSpan, anchor_of
from rollout.bridge.chains import continues, cut_chain, find_chains, places_of
from rollout.bridge.framework import Sample
from rollout.bridge.trace import attach_trace
from rollout.spec import session_of
from rollout.tokens.token_prefix import token_prefix
from rollout.turn import Generation, Prompt, SampleKind, Segment, Turn

ROW_KEY = "turn_row"
"""Key of `sample.train_metadata` that holds the sample's `TurnRow` until the converter encodes
it."""
LATER_GROUPS = "later_groups"
"""Key of `sample.train_metadata`: the training groups of the sample's later turns, if they have
their own."""


class SampleWriter:
    """Makes and fills samples for one run; `dummy_token` is the untrained response of bootstrap and
    inert ones."""

    def __init__(self, args: Any, dummy_token: int, *, chains: bool = False) -> None:
        """With `chains`, a sample may hold several turns."""
        self._args = args
        self.dummy_token = dummy_token
        self.chains = chains
        self.turns_per_step: int | None = getattr(args, "global_batch_size", None)

    def new(self, training_group: int, segment: int, prompt: Prompt) -> Sample:
        """A sample that ends with the prompt's tokens and has no response yet."""
        sample = Sample()
        sample.index = training_group
        sample.group_index = segment
        sample.prompt = ""
        set_group(sample, training_group)
        restart(sample, prompt)
        set_images(sample, prompt)
        return sample

    def append_generation(self, sample: Sample, generation: Generation) -> None:
        """Append the model's tokens; slime updates its own records (routing, top-p, speculation,
        caching)."""
        routed = sample.rollout_routed_experts
        log_probs = generation.log_probs if generation.trained else None
        meta_info = dict(generation.meta_info)
        if self._keeps_top_p:
            sample.append_response_tokens(
                self._args,
                tokens=list(generation.token_ids),
                log_probs=None if log_probs is None else list(log_probs),
                trainable=generation.trained,
                meta_info=meta_info,
                text=generation.text,
            )
            if not generation.trained and sample.rollout_top_p_token_offsets is None:
                self._fill_top_p(sample)
        else:
            self._append(sample, generation.token_ids, log_probs)
            # Without tokens, slime only updates its records; given tokens, it would turn all of
            # them into lists.
            sample.append_response_tokens(self._args, meta_info=meta_info, text=generation.text)
        # The engine returns the experts of prompt and response; earlier responses keep those that
        # wrote them.
        if routed is not None and sample.rollout_routed_experts is not routed:
            earlier = torch.as_tensor(routed)
            now = torch.as_tensor(sample.rollout_routed_experts)
            sample.rollout_routed_experts = torch.cat([earlier, now[len(earlier) :]])

    def append_dummy(self, sample: Sample) -> None:
        """Append one masked token, at which the critic computes the value of the prompt."""
        self._append(sample, [self.dummy_token], None)
        sample.reward = 0.0
        sample.status = Sample.Status.COMPLETED
        self._fill_top_p(sample)
        self.fill_routed(sample)

    def append_state(self, sample: Sample, prompt: Prompt) -> int:
        """Append what the prompt adds to the sample's turns, and a masked token for its value;
        returns its offset."""
        self.append_masked(sample, [*prompt.token_ids[len(sample.tokens) :], self.dummy_token])
        if sample.rollout_routed_experts is not None:
            self.fill_routed(sample)
        return sample.response_length - 1

    def make_inert(self, sample: Sample, segment: int) -> None:
        """Replace the sample's content by one masked token, as a separate episode without loss."""
        restart(sample, Prompt([self.dummy_token]))
        self.append_dummy(sample)
        set_row(sample, TurnRow(segment, 0, TurnKind.TURN, True, False, (TurnSpan(0, 1, 0.0),)))

    def chains_of(self, turns: Sequence[Turn], steps: Sequence[int]) -> list[list[int]]:
        """Return the turns, as positions, that share a sample; `steps` has the optimizer step of
        each."""
        chains = (
            find_chains(turns) if self.chains else [[position] for position in range(len(turns))]
        )
        return sorted(part for chain in chains for part in cut_chain(chain, steps))

    def padding(self, training_group: int, segment: int) -> Sample:
        """A sample of two tokens that only fills an optimizer step: it has no loss, and its value
        is not used."""
        sample = self.new(training_group, segment, Prompt([self.dummy_token]))
        self.append_dummy(sample)
        sample.metadata = {
            "kind": SampleKind.PADDING,
            "task_name": SampleKind.PADDING,
            "round_number": 0,
        }
        set_row(sample, TurnRow(segment, 0, TurnKind.BOOTSTRAP))
        return sample

    def append_masked(self, sample: Sample, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not write: part of the response, masked from the
        loss."""
        if self._keeps_top_p:
            sample.append_response_tokens(self._args, tokens=list(token_ids), trainable=False)
        else:
            self._append(sample, token_ids, None)

    @property
    def _keeps_top_p(self) -> bool:
        """Whether slime keeps the kept tokens of top-p sampling, which it does only while it
        appends tokens."""
        return getattr(self._args, "rollout_top_p", 1.0) != 1.0

    def _fill_top_p(self, sample: Sample) -> None:
        if self._keeps_top_p:
            sample.rollout_top_p_token_ids = []
            sample.rollout_top_p_token_offsets = [0] * (sample.response_length + 1)

    def _append(
        self, sample: Sample, ids: Sequence[int], log_probs: Sequence[float] | None
    ) -> None:
        """Append tokens, masked without log-probs; slime declares lists, but other sequences
        work."""
        compact = cast(Any, sample)
        compact.tokens = token_prefix(sample.tokens).extended(ids)
        sample.response_length += len(ids)
        # A list, because slime sums it up, and sums of numpy's uint8 overflow.
        sample.loss_mask = (sample.loss_mask or []) + [int(log_probs is not None)] * len(ids)
        new = array("f", bytes(4 * len(ids)) if log_probs is None else log_probs)
        compact.rollout_log_probs = array("f", sample.rollout_log_probs or ()) + new

    def fill_routed(self, sample: Sample) -> None:
        """Give the last tokens, which no engine saw, any experts to replay; they are masked."""
        if not getattr(self._args, "use_rollout_routing_replay", False):
            return
        experts = torch.arange(self._args.moe_router_topk, dtype=torch.int32)
        rows = experts.expand(len(sample.tokens) - 1, self._args.num_layers, -1).clone()
        known = sample.rollout_routed_experts
        if known is not None:
            rows[: len(known)] = torch.as_tensor(known)
        sample.rollout_routed_experts = rows


def build_samples(
    segments: Sequence[Segment],
    group_ids: Sequence[int],
    writer: SampleWriter,
    staleness: Sequence[int] | None = None,
) -> list[list[Sample]]:
    """Return the samples of each segment: its chains in the order of their first turns, then its
    bootstrap sample.

    Without `writer.chains`, each turn is a chain. A bootstrap state that continues the last turn's
    chain is its end.

    Args:
        group_ids: one per turn, in the order of the segments; together they are consecutive
            numbers, and their order is that of the optimizer steps.
        staleness: of each turn, actor updates between playing and training it; -1 if unknown.
    """
    stale = staleness if staleness is not None else [-1] * len(group_ids)
    samples: list[list[Sample]] = []
    first = min(group_ids, default=0)
    per_step = writer.turns_per_step or len(group_ids)
    begin = 0
    for number, segment in enumerate(segments):
        end = begin + len(segment.turns)
        groups = group_ids[begin:end]
        steps = [(group - first) // per_step for group in groups]
        samples.append(segment_samples(writer, segment, number, groups, stale[begin:end], steps))
        begin = end
    return samples


def segment_samples(
    writer: SampleWriter,
    segment: Segment,
    number: int,
    groups: Sequence[int],
    staleness: Sequence[int],
    steps: Sequence[int] | None = None,
) -> list[Sample]:
    """Return one segment's samples; `groups`, `staleness` and `steps`, the optimizer steps, have
    one entry per turn."""
    chains = writer.chains_of(segment.turns, steps or [0] * len(segment.turns))
    state = segment.bootstrap
    samples: list[Sample] = []
    for chain in chains:
        turns = [segment.turns[k] for k in chain]
        inside = None
        if (
            state is not None
            and writer.chains
            and turns[-1] is segment.turns[-1]
            and continues(state, turns[-1])
        ):
            inside = state
            state = None
        stale = [staleness[k] for k in chain]
        sample = chain_sample(
            writer, turns, number, groups[chain[0]], segment.task_name, stale, inside
        )
        later = [groups[k] for k in chain if groups[k] != groups[chain[0]]]
        if later:
            _add_train_metadata(sample, {LATER_GROUPS: later})
        samples.append(sample)
    if state is not None:
        samples.append(bootstrap_sample(writer, segment, number, groups[-1]))
    return samples


def chain_sample(
    writer: SampleWriter,
    turns: Sequence[Turn],
    segment: int,
    group: int,
    task_name: str,
    staleness: Sequence[int],
    state: Prompt | None = None,
) -> Sample:
    """Make the sample of a chain: the model's tokens, trained unless they were altered, and gaps,
    masked.

    Args:
        turns: at least one; each but the first continues the one before it.
        segment: id that the samples of one segment share in the batch, and no others.
        group: the training group.
        staleness: of each turn, actor updates between playing and training it; -1 if unknown.
        state: the bootstrap state's prompt, if it continues the last turn.
    """
    sample = writer.new(group, segment, turns[0].prompt)
    spans: list[TurnSpan] = []
    index = turns[0].index
    for turn, updates in zip(turns, staleness, strict=True):
        if spans:
            writer.append_masked(sample, turn.prompt.token_ids[len(sample.tokens) :])
        start = sample.response_length
        writer.append_generation(sample, turn.generation)
        action = start + turn.action_span[0] if turn.action_span else -1
        anchor = anchor_of(token_prefix(turn.prompt.token_ids).to_numpy()) if turn.stepped else -1
        skips = turn.index - index
        edges = start, sample.response_length
        span = TurnSpan(
            *edges, turn.reward, action, anchor, updates, turn.moves, skips, turn.baseline
        )
        spans.append(span)
        index = turn.index + 1
    place = writer.append_state(sample, state) if state is not None else -1
    last = turns[-1]
    set_images(sample, state or last.prompt)
    ends = last.terminated, last.truncated
    set_row(
        sample,
        TurnRow(segment, turns[0].index, TurnKind.TURN, *ends, tuple(spans), bootstrap=place),
    )
    sample.reward = sum(turn.reward for turn in turns)
    sample.session_id = session_of(last.episode_id)
    sample.metadata = {"task_name": task_name, "episode_id": last.episode_id, **turn_facts(last)}
    if len(turns) > 1:
        sample.metadata[FACTS_OF_TURNS] = [turn_facts(turn) for turn in turns]
    attach_trace(sample, turns)
    return sample


FACTS_OF_TURNS = "turn_facts"
"""Key of a sample's metadata: what `turn_facts` says of each of its turns, if there are several."""
_FACTS = (
    "action",
    "executed_action",
    "reward",
    "terminated",
    "truncated",
    "progression",
    "engine_s",
    "env_s",
)


def turn_facts(turn: Turn) -> dict[str, Any]:
    """Collect the values of a turn that the metrics and the trajectory viewer read."""
    return {
        "round_number": turn.index,
        "kind": SampleKind.TURN,
        "valid_action": turn.valid,
        **{name: getattr(turn, name) for name in _FACTS},
        "finish_reason": turn.generation.finish_reason,
        "mixed_weights": len(set(turn.generation.weight_versions)) > 1,
        "env_metrics": dict(turn.metrics),
        **({} if turn.notes is None else {"notes": turn.notes}),
        **({} if turn.summary is None else {"summary": dict(turn.summary)}),
    }


def bootstrap_sample(writer: SampleWriter, segment: Segment, number: int, group: int) -> Sample:
    """Make the sample of the state after the last turn: its prompt and one dummy token, without
    loss."""
    assert segment.bootstrap is not None
    turn = segment.turns[-1]
    sample = writer.new(group, number, segment.bootstrap)
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
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = []
    sample.rollout_log_probs = []
    sample.weight_versions = []
    sample.remove_sample = False


def set_images(sample: Sample, prompt: Prompt) -> None:
    """Set the prompt's images as the model's forward pass takes them."""
    sample.multimodal_train_inputs = (
        dict(prompt.train_inputs) if prompt.train_inputs is not None else None
    )


def set_group(sample: Sample, group: int) -> None:
    """Put the sample into the training group `group`."""
    sample.rollout_id = group


def group_of(sample: Sample) -> int:
    """The sample's training group; without one, its index, which may be 0."""
    group = sample.index if sample.rollout_id is None else sample.rollout_id
    return group or 0


def set_row(sample: Sample, row: TurnRow) -> None:
    """Attach the sample's row of the turn table."""
    _add_train_metadata(sample, {ROW_KEY: row})


def _add_train_metadata(sample: Sample, entries: Mapping[str, Any]) -> None:
    sample.train_metadata = {**(sample.train_metadata or {}), **entries}


def row_of(sample: Sample) -> TurnRow | None:
    """The sample's row of the turn table; None if another rollout made the sample."""
    return (sample.train_metadata or {}).get(ROW_KEY)


def places_in_train_data(samples: Sequence[Sample]) -> list[int]:
    """Return the position of each sample in the train data that the converter makes of them."""
    return places_of(
        [group_of(sample) for sample in samples], [later_groups(sample) for sample in samples]
    )


def later_groups(sample: Sample) -> Sequence[int]:
    """The training groups of the sample's later turns; empty if they have none of their own."""
    return (sample.train_metadata or {}).get(LATER_GROUPS, ())


def flatten(samples: Iterable[Sample | Sequence[Sample]]) -> list[Sample]:
    """List single samples and the samples of groups in one list."""
    return [
        part for sample in samples for part in ([sample] if isinstance(sample, Sample) else sample)
    ]


def facts_of(sample: Sample) -> Mapping[str, Any]:
    """What the rollout recorded of the sample's turn or episode: its kind, task, outcome and stop
    reason."""
    return sample.metadata or {}


def facts_of_turns(sample: Sample) -> list[Mapping[str, Any]]:
    """What the rollout recorded of each turn of the sample."""
    facts = facts_of(sample)
    return facts.get(FACTS_OF_TURNS) or [facts]
