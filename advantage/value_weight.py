"""The value loss of each turn's first token weighs more, because that token's value is what other turns bootstrap from.

slime's `value_loss_function` is handed a reducer that turns per-token losses into one number; the weight rides on
that reducer, so the loss itself stays slime's. Only the numerator is weighted, as in Verlog: with weight w the mean
over n tokens becomes (w l_0 + l_1 + ... + l_{n-1}) / n. What differs from Verlog is the framework's own: Verlog takes
half the squared error and averages over the micro-batch's tokens, slime takes the whole and averages over each turn's
tokens, then over turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.maths.packing import PackedTurns
from advantage.megatron.context_parallel import response_spans, slice_rows
from advantage.megatron.layout import current_layout
from advantage.settings import advantage_settings

Reducer = Callable[[Tensor], Tensor]
ValueLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def first_tokens(mask: Tensor) -> Tensor:
    """Where a run of trained tokens begins, [n] bool: the first trained token of each turn (`check_first_tokens`)."""
    trained = mask.bool()
    return trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])[: len(trained)]


def first_token_weights(masks: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Per-token weights of full response rows: `weight` on each turn's first trained token, 1 elsewhere; float32."""
    return [torch.where(first_tokens(mask), weight, 1.0) for mask in masks]


def check_first_tokens(packed: PackedTurns, masks: Sequence[Tensor]) -> None:
    """Make sure that the loss mask alone tells where turns begin, which is all that the value loss gets to see.

    Raises:
        TurnTableError: turns touch, or a turn is trained in several pieces; names the sample.
    """
    if not masks:
        return
    sizes = [len(mask) for mask in masks]
    runs = torch.cat([first_tokens(mask) for mask in masks])
    begins = torch.zeros_like(runs)
    heads = (packed.lengths.cumsum(0) - packed.lengths)[packed.lengths > 0]
    heads = heads[packed.trained[heads]]
    begins[packed.places[heads]] = True
    if torch.equal(runs, begins):
        return
    pairs = zip(runs.split(sizes), begins.split(sizes), strict=True)
    i, (found, real) = next((i, pair) for i, pair in enumerate(pairs) if not torch.equal(*pair))
    where = lambda x: x.nonzero()[:, 0].tolist()
    raise TurnTableError(
        f"sample {i}: its turns begin at tokens {where(real)}, but its loss mask has runs beginning at {where(found)}, "
        "so value_first_token_weight cannot tell them apart; leave a masked token between turns and none inside, or "
        "set value_first_token_weight: 1.0"
    )


def weigh_first_tokens(value_loss: ValueLoss) -> ValueLoss:
    """slime's `value_loss_function` with its loss weighted by `args.value_first_token_weight`."""

    @functools.wraps(value_loss)
    def weighted(
        args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight = advantage_settings(args).value_first_token_weight
        rows = first_token_weights(batch["loss_masks"], weight)
        local = slice_rows(rows, response_spans(batch, current_layout()))
        return value_loss(args, batch, logits, weigh_reducer(sum_of_sample_mean, torch.cat(local)))

    return weighted


def weigh_reducer(reduce: Reducer, weights: Tensor) -> Reducer:
    """The reducer with weights on whatever carries gradient; what is only reported (clip fraction) stays plain."""
    return lambda x: reduce(x * weights.to(x.device) if x.requires_grad else x)
