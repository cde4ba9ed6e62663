"""Gives each turn's first token more weight in the value loss, because the previous turn bootstraps from its value.

slime passes `value_loss_function` a reducer that averages per-token losses. This module wraps the reducer, and slime's
loss stays as it is. As in Verlog only the numerator is weighted: with weight w, the mean over n tokens becomes
(w l_0 + l_1 + ... + l_{n-1}) / n. One difference comes from the framework: Verlog takes half the squared error and
averages over the micro-batch's tokens; slime takes the whole and averages over each turn's tokens, then over turns.
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
    """The first token of each run of trained tokens, [n] bool; `check_first_tokens` ensures that a run is a turn."""
    trained = mask.bool()
    return trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])[: len(trained)]


def first_token_weights(masks: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Per-token weights of full response rows: `weight` on each turn's first trained token, 1 elsewhere; float32."""
    return [torch.where(first_tokens(mask), weight, 1.0) for mask in masks]


def check_first_tokens(packed: PackedTurns, masks: Sequence[Tensor]) -> None:
    """Check that the loss mask alone shows where turns begin, because the value loss has nothing else.

    Raises:
        TurnTableError: turns are adjacent, or a turn has untrained tokens inside; names the sample.
    """
    if not masks:
        return
    sizes = [len(mask) for mask in masks]
    runs = torch.cat([first_tokens(mask) for mask in masks])
    begins = torch.zeros_like(runs)
    heads = (packed.lengths.cumsum(0) - packed.lengths)[packed.lengths > 0]
    heads = heads[packed.trained[heads]]
    begins[packed.positions[heads]] = True
    if torch.equal(runs, begins):
        return
    pairs = zip(torch.split(runs, sizes), torch.split(begins, sizes), strict=True)
    i, pair = next((i, pair) for i, pair in enumerate(pairs) if not torch.equal(*pair))
    found, real = ([int(j) for j in x.nonzero()[:, 0]] for x in pair)
    raise TurnTableError(
        f"sample {i}: its turns begin at tokens {real}, but its loss mask has runs beginning at {found}, so "
        "value_first_token_weight cannot find the first tokens; mask a token between turns and none inside a turn, or "
        "set value_first_token_weight: 1.0"
    )


def weigh_first_tokens(value_loss: ValueLoss) -> ValueLoss:
    """Wrap slime's `value_loss_function` so that `args.value_first_token_weight` applies."""

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
    """Wrap a reducer: inputs with a gradient are weighted, metrics such as the clip fraction are not."""
    return lambda x: reduce(x * weights.to(x.device) if x.requires_grad else x)
