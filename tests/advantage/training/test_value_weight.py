"""The first-token value weight applies to exactly one token per turn, and reproduces Verlog's loss."""

import random
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.hook import compute_advantages
from advantage.packing import check_first_tokens, pack_turns
from advantage.training.losses import first_token_weights, weigh_first_tokens
from advantage.turn_table import TurnRow, TurnSpan, encode_row, read_columns
from tests.advantage.batches import make_args, make_samples
from tests.conftest import load_recording


def check(rows: TurnRow | list[TurnRow], *masks: Tensor) -> None:
    """`check_first_tokens` on the samples with these rows."""
    lengths = [len(mask) for mask in masks]
    vectors = [encode_row(row) for row in (rows if isinstance(rows, list) else [rows])]
    check_first_tokens(pack_turns(read_columns(vectors, lengths), masks, lengths), lengths)


def reducer(masks: list[Tensor]) -> Any:
    """slime's per-sample mean, summed."""
    sizes = [len(m) for m in masks]
    return lambda x: sum(
        (part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(x.split(sizes), masks, strict=True)
    )


def squared_error(args: Any, batch: dict, logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Tensor]]:
    losses = (logits - torch.cat(batch["returns"])) ** 2
    return reduce(losses), {"value_clipfrac": reduce((losses > 0.5).float())}


def batch_of(masks: list[list[int]]) -> dict[str, Any]:
    tensors = [torch.tensor(m) for m in masks]
    return {
        "loss_masks": tensors,
        "returns": [torch.arange(len(m)).float() for m in masks],
        "response_lengths": [len(m) for m in masks],
        "total_lengths": [len(m) + 4 for m in masks],
    }


def test_one_turn_per_sample_weighs_its_first_token() -> None:
    weights = first_token_weights([torch.tensor([1, 1, 1]), torch.tensor([1])], 3.0)
    assert [w.tolist() for w in weights] == [[3.0, 1.0, 1.0], [3.0]]


def test_many_turns_per_sample_weigh_one_token_each() -> None:
    (weights,) = first_token_weights([torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1])], 3.0)
    assert weights.tolist() == [1.0, 3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 3.0, 1.0]


def test_a_masked_or_empty_response_weighs_nothing_extra() -> None:
    assert [w.tolist() for w in first_token_weights([torch.zeros(3), torch.zeros(0)], 3.0)] == [[1.0] * 3, []]


@pytest.mark.parametrize("seed", range(20))
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


def test_gradient_is_weighted_on_first_tokens_and_reported_fractions_are_not() -> None:
    batch = batch_of([[1, 1, 1], [0, 1, 1, 0, 1]])
    logits = torch.full((8,), 10.0)
    plain, heavy = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, metrics = squared_error(None, batch, plain, reducer(batch["loss_masks"]))
    args = Namespace(value_first_token_weight=3.0)
    loss3, metrics3 = weigh_first_tokens(squared_error)(args, batch, heavy, reducer(batch["loss_masks"]))
    loss.backward()
    loss3.backward()
    expected = torch.tensor([3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0])
    torch.testing.assert_close(heavy.grad, plain.grad * expected)
    assert metrics == metrics3 and loss3 > loss


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


def test_one_masked_token_between_turns_tells_them_apart() -> None:
    check(row_of((0, 2), (2, 4)), torch.tensor([1, 0, 1, 1]))


def test_a_refusal_names_the_sample_and_its_own_token_positions() -> None:
    rows = [row_of((0, 2)), row_of((0, 1)), row_of((1, 3), (3, 4)), row_of((0, 3))]
    masks = [torch.tensor(mask) for mask in ([1, 1], [1], [0, 1, 1, 1], [1, 1, 1])]
    with pytest.raises(TurnTableError, match=r"sample 2: its turns begin at tokens \[1, 3\].* beginning at \[1\]"):
        check(rows, *masks)


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
