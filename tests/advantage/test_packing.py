"""Turns are packed as their spans and loss masks say; runs of trained tokens count what a loop over tokens counts."""

import random

import pytest
import torch

from advantage.packing import TrainedRuns, pack_turns, span_positions
from advantage.turn_table import TurnRow, TurnSpan, encode_row, read_columns
from tests.advantage.batches import make_samples, rollout_data


@pytest.mark.parametrize("seed", range(10))
def test_trained_tokens_before_a_position_are_counted_from_the_runs(seed: int) -> None:
    rng = random.Random(seed)
    mask = torch.tensor([rng.random() < rng.choice([0.1, 0.9]) for _ in range(rng.choice([0, 1, 5, 60]))]).bool()
    positions = torch.arange(len(mask) + 1)
    assert TrainedRuns(mask).before(positions).tolist() == [int(mask[:p].sum()) for p in positions]


def test_span_positions_are_the_spans_laid_end_to_end() -> None:
    assert span_positions(torch.tensor([5, 0, 9, 2]), torch.tensor([2, 0, 1, 3])).tolist() == [5, 6, 9, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_masked_tokens_inside_a_turn_are_skipped_and_a_masked_turn_is_kept_whole(seed: int) -> None:
    samples = make_samples(random.Random(seed), 5)
    data = rollout_data(samples)
    lengths = data["response_lengths"]
    packed = pack_turns(read_columns(data["prompt"], lengths), data["loss_masks"], lengths)
    wanted, offset = [], 0
    for sample in samples:
        for span in sample.row.turns:
            inside = range(span.start, span.end)
            wanted.append([offset + j for j in inside if sample.mask[j]] or [offset + j for j in inside])
        if not sample.row.turns:
            wanted.append([offset])
        offset += len(sample.mask)
    positions = torch.arange(offset) if packed.positions is None else packed.positions
    assert [part.tolist() for part in positions.split(packed.lengths.tolist())] == wanted
    flat = torch.cat(data["values"])
    assert torch.equal(packed.take(flat), flat[positions])
    assert torch.equal(packed.take(packed.put(packed.take(flat))), packed.take(flat))


def test_without_gaps_the_responses_themselves_are_the_packed_tokens() -> None:
    row = TurnRow(0, 0, terminated=True, turns=(TurnSpan(0, 2, 1.0), TurnSpan(2, 3, 1.0)))
    masks = [torch.tensor([1, 1, 0])]
    packed = pack_turns(read_columns([encode_row(row)], [3]), masks, [3])
    assert packed.positions is None
    assert packed.untrained.tolist() == [2]
