"""The first-token value weight applies to exactly one token per turn, and reproduces Verlog's loss."""

import random

import pytest
import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.hook import compute_advantages
from advantage.packing import check_first_tokens, pack_turns
from advantage.training.losses import first_token_weights
from advantage.turn_table import TurnRow, TurnSpan, encode_row, read_columns
from tests.advantage.batches import make_args, make_samples
from tests.conftest import load_recording


def check(rows: TurnRow | list[TurnRow], *masks: Tensor) -> None:
    """`check_first_tokens` on the samples with these rows."""
    lengths = [len(mask) for mask in masks]
    vectors = [encode_row(row) for row in (rows if isinstance(rows, list) else [rows])]
    check_first_tokens(pack_turns(read_columns(vectors, lengths), masks, lengths), lengths)


def test_a_masked_or_empty_response_weighs_nothing_extra() -> None:
    assert [w.tolist() for w in first_token_weights([torch.zeros(3), torch.zeros(0)], 3.0)] == [[1.0] * 3, []]


@pytest.mark.parametrize("seed", range(8))
def test_exactly_one_token_is_weighted_in_every_turn_that_is_trained(seed: int) -> None:
    samples = make_samples(random.Random(seed), 6)
    checked = 0
    for sample in samples:
        mask = torch.tensor(sample.mask)
        try:
            check(sample.row, mask)
        except TurnTableError:
            continue
        (weights,) = first_token_weights([mask], 3.0)
        for turn in sample.row.turns:
            heavy = (weights[turn.start : turn.end] == 3.0).sum()
            assert heavy == int(mask[turn.start : turn.end].any())
            checked += 1
        assert (weights == 3.0).sum() == sum(bool(mask[t.start : t.end].any()) for t in sample.row.turns)
    assert checked


def row_of(*spans: tuple[int, int]) -> TurnRow:
    return TurnRow(0, 0, turns=tuple(TurnSpan(a, b, 0.0) for a, b in spans))


@pytest.mark.parametrize(("row", "mask"), [(row_of((0, 2), (2, 4)), [1, 1, 1, 1]), (row_of((0, 4)), [1, 0, 1, 1])])
def test_turns_that_the_mask_does_not_separate_are_refused(row: TurnRow, mask: list[int]) -> None:
    with pytest.raises(TurnTableError, match=r"sample 0: .* value_first_token_weight: 1\.0"):
        check(row, torch.tensor(mask))
    data = {"prompt": [encode_row(row)], "loss_masks": [torch.tensor(mask)], "response_lengths": [4]}
    data |= {"total_lengths": [6], "values": [torch.zeros(4)], "kl": [torch.zeros(4)]}
    with pytest.raises(TurnTableError, match=r"sample 0"):
        compute_advantages(make_args(value_first_token_weight=3.0), data)


@pytest.mark.parametrize("weight", ["0", "3", "5"])
def test_the_value_loss_reproduces_verlogs_recorded_loss(weight: str) -> None:
    for record in load_recording("verlog_gae.json.gz"):
        values, predicted, returns = (torch.tensor(record[k]) for k in ("values", "vpreds", "returns"))
        masks = torch.tensor(record["critic_mask"]).float()
        clipped = values + (predicted - values).clamp(-0.5, 0.5)
        losses = torch.maximum((predicted - returns) ** 2, (clipped - returns) ** 2)
        if weight != "0":
            losses = losses * torch.stack(first_token_weights(list(masks), float(weight)))
        loss = 0.5 * (losses * masks).sum() / masks.sum()
        torch.testing.assert_close(loss.item(), record["value_loss_by_highlight"][weight][0], atol=1e-5, rtol=0)
