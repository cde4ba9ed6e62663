"""The first-token value weight applies to exactly one token per turn, and reproduces Verlog's
loss."""

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.packing import check_first_tokens, pack_turns
from advantage.training.losses import first_token_weights
from advantage.turn_table import TurnRow, TurnSpan, encode_row, read_columns
from tests.advantage.batches import make_samples, run, sample_of
from tests.advantage.vectors import first_token_case
from tests.conftest import load_recording


def check(row: TurnRow, mask: Tensor) -> None:
    """`check_first_tokens` on the sample with this row."""
    lengths = [len(mask)]
    check_first_tokens(
        pack_turns(read_columns([encode_row(row)], lengths), [mask], lengths), lengths
    )


def test_a_masked_or_empty_response_weighs_nothing_extra() -> None:
    assert [w.tolist() for w in first_token_weights([torch.zeros(3), torch.zeros(0)], 3.0)] == [
        [1.0] * 3,
        [],
    ]


@pytest.mark.parametrize("seed", range(8))
def test_exactly_one_token_is_weighted_in_every_turn_that_is_trained(seed: int) -> None:
    """In all samples whose turns the mask separates; others are refused."""
    checked = 0
    for sample in make_samples(random.Random(seed), 6):
        mask = torch.tensor(sample.mask)
        with suppress(TurnTableError):
            check(sample.row, mask)
            (weights,) = first_token_weights([mask], 3.0)
            heavy = weights == 3.0
            trained = [bool(mask[turn.start : turn.end].any()) for turn in sample.row.turns]
            assert [int(heavy[turn.start : turn.end].sum()) for turn in sample.row.turns] == trained
            assert heavy.sum() == sum(trained)
            checked += len(trained)
    assert checked


def test_the_loss_is_that_of_the_definition() -> None:
    for mask, weight in (([1, 1, 1], 3.0), ([0, 1, 1, 0, 0, 1, 1, 1], 2.0)):
        case = first_token_case(random.Random(0), mask, weight)
        (weights,) = first_token_weights([torch.tensor(mask)], weight)
        losses = weights * torch.tensor(case["token_losses"]) * torch.tensor(mask)
        assert float(losses.sum() / sum(mask)) == pytest.approx(case["loss"])


def row_of(*spans: tuple[int, int]) -> TurnRow:
    return TurnRow(0, 0, turns=tuple(TurnSpan(a, b, 0.0) for a, b in spans))


@pytest.mark.parametrize(
    ("row", "mask"), [(row_of((0, 2), (2, 4)), [1, 1, 1, 1]), (row_of((0, 4)), [1, 0, 1, 1])]
)
def test_turns_that_the_mask_does_not_separate_are_refused(row: TurnRow, mask: list[int]) -> None:
    with pytest.raises(TurnTableError, match=r"sample 0: .* value_first_token_weight: 1\.0"):
        check(row, torch.tensor(mask))
    with pytest.raises(TurnTableError, match=r"sample 0"):
        run([sample_of(row, mask)], value_first_token_weight=3.0)


@pytest.mark.parametrize("weight", ["0", "3", "5"])
def test_the_value_loss_reproduces_verlogs_recorded_loss(weight: str) -> None:
    for record in load_recording("verlog_gae.json.gz"):
        values, predicted, returns = (
            torch.tensor(record[k]) for k in ("values", "vpreds", "returns")
        )
        masks = torch.tensor(record["critic_mask"]).float()
        clipped = values + (predicted - values).clamp(-0.5, 0.5)
        losses = torch.maximum((predicted - returns) ** 2, (clipped - returns) ** 2)
        if weight != "0":
            losses = losses * torch.stack(first_token_weights(list(masks), float(weight)))
        loss = 0.5 * (losses * masks).sum() / masks.sum()
        torch.testing.assert_close(
            loss.item(), record["value_loss_by_highlight"][weight][0], atol=1e-5, rtol=0
        )
