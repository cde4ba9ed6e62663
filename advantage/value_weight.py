"""Gives each turn's first token more weight in the value loss, because the previous turn bootstraps from its value.

slime passes `value_loss_function` a reducer that averages per-token losses. This module wraps the reducer, and slime's
loss stays as it is. As in Verlog only the numerator is weighted: with weight w, the mean over n tokens becomes
(w l_0 + l_1 + ... + l_{n-1}) / n. One difference comes from the framework: Verlog takes half the squared error and
averages over the micro-batch's tokens; slime takes the whole and averages over each turn's tokens, then over turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.packing import PackedTurns
from advantage.ranks import current_layout, local_tokens
from advantage.settings import advantage_settings
from advantage.turn_table import whole_numbers

Reducer = Callable[[Tensor], Tensor]
ValueLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def first_tokens(mask: Tensor) -> Tensor:
    """The first token of each run of trained tokens, [n] bool; `check_first_tokens` ensures that a run is a turn."""
    trained = mask.bool()
    return trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])[: len(trained)]


def first_token_weights(masks: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Per-token weights of full response rows: `weight` on each turn's first trained token, 1 elsewhere; float32."""
    return [torch.where(first_tokens(mask), weight, 1.0) for mask in masks]


def check_first_tokens(packed: PackedTurns, lengths: Sequence[int]) -> None:
    """Check that the loss mask alone shows where turns begin, because the value loss has nothing else.

    Args:
        packed: the turns.
        lengths: response tokens of each sample.

    Raises:
        TurnTableError: turns are adjacent, or a turn has untrained tokens inside; names the sample.
    """
    sizes = whole_numbers(lengths)
    ends = sizes.cumsum(0)
    starts = (ends - sizes)[sizes > 0].to(packed.trained.device)
    runs = packed.runs
    unique: Callable[..., Any] = cast(Any, torch).unique
    found: Tensor = unique(torch.cat([runs.starts, starts[runs.mask[starts]]]))
    real = (packed.lengths.cumsum(0) - packed.lengths)[packed.trained]
    real = real if packed.positions is None else packed.positions[real]
    if torch.equal(found, real):
        return
    begins, counts = unique(torch.cat([found, real]), return_counts=True)
    wrong = int(begins[counts == 1][0])
    i = int((ends <= wrong).sum())
    start, end = int(ends[i] - sizes[i]), int(ends[i])
    inside = [[int(j) - start for j in x.unbind(0) if start <= int(j) < end] for x in (real, found)]
    raise TurnTableError(
        f"sample {i}: its turns begin at tokens {inside[0]}, but its loss mask has runs beginning at {inside[1]}, so "
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
        weights = torch.cat(first_token_weights(batch["loss_masks"], weight))
        local = local_tokens(batch, current_layout()).pick(weights)
        return value_loss(args, batch, logits, weigh_reducer(sum_of_sample_mean, local))

    return weighted


def weigh_reducer(reduce: Reducer, weights: Tensor) -> Reducer:
    """Wrap a reducer: inputs with a gradient are weighted, metrics such as the clip fraction are not."""
    return lambda x: reduce(x * weights.to(x.device) if x.requires_grad else x)
