"""Whitens the actor's advantages, and weighs the critic's value loss.

Each turn's first token has more weight in the value loss, because the previous turn bootstraps from
its value. With weight w, the mean over a turn's n tokens becomes (w l_0 + l_1 + ... + l_{n-1}) / n.
Verlog takes half the squared error and averages over the micro-batch's tokens; slime takes the
whole and averages over each turn's tokens first.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from advantage.exchange import Group, current_layout
from advantage.packing import local_tokens
from advantage.settings import advantage_settings

Reducer = Callable[[Tensor], Tensor]
ValueLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def first_tokens(mask: Tensor) -> Tensor:
    """Mark the first token of each run of trained tokens, [n] bool; a run is a turn
    (`check_first_tokens`)."""
    trained = mask.bool()
    first = trained.clone()
    first[1:] &= ~trained[:-1]
    return first


def first_token_weights(masks: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Weigh the tokens of full response rows: `weight` for each turn's first trained token, 1
    otherwise; float32."""
    return [torch.where(first_tokens(mask), weight, 1.0) for mask in masks]


def turn_weights(mask: Tensor, denominator: Tensor) -> Tensor:
    """Weigh the response tokens [n] of a sample with several turns such that each turn counts as
    much, [n] floating.

    A turn of k trained tokens has the weight denominator / k at each; divided by the denominator,
    it is its mean. Turns are runs of trained tokens in `mask`. Other samples have their mask back:
    their denominator, which includes all samples of their training group, is at least the number of
    their trained tokens.
    """
    trained = mask.bool()
    if denominator >= trained.sum():
        return mask
    turn = first_tokens(mask).cumsum(0)
    sizes = torch.bincount(turn[trained])
    return torch.where(trained, denominator / sizes[turn].clamp(min=1), 0.0)


def weigh_first_tokens(value_loss: ValueLoss) -> ValueLoss:
    """Wrap slime's `value_loss_function` so that `args.value_first_token_weight` applies."""

    @functools.wraps(value_loss)
    def weighted(
        args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight = advantage_settings(args).value_first_token_weight
        weights = torch.cat(first_token_weights(batch["loss_masks"], weight))
        local = local_tokens(batch, current_layout())
        reduce = weigh_reducer(sum_of_sample_mean, local.pick(weights))
        return value_loss(args, batch, logits, reduce)

    return weighted


def weigh_reducer(reduce: Reducer, weights: Tensor) -> Reducer:
    """Wrap a reducer: inputs with a gradient are weighted, metrics such as the clip fraction are
    not."""

    def weighted(x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x * weights.to(x.device)
        return reduce(x)

    return weighted


@torch.no_grad()
def whiten(rows: Sequence[Tensor], masks: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Scale the rows to mean 0 and variance 1 over the group's trained tokens; float64 sums, one
    all-reduce.

    Call it on every rank, after the returns are computed. As in slime, untrained tokens are shifted
    and scaled too. `masks` are 1 on trained tokens and shaped like `rows`; `group` is
    `Layout.data_context`. Raises ValueError if the whole group has no trained token.
    """
    nothing = [torch.zeros(0)]
    flat = torch.cat(list(rows) or nothing).double()
    trained = torch.cat(list(masks) or nothing).bool()
    kept = flat[trained]
    number = kept.new_tensor(float(len(kept)))
    sums = torch.stack([number, kept.sum(), (kept**2).sum()])
    count, total, squares = group.total(sums, like=flat).unbind(0)
    mean = total / count
    if count == 0:
        raise ValueError(
            "no token of this batch is trained, so advantages cannot be whitened; check the loss "
            "masks"
        )
    correction = count / (count - 1).clamp(min=1)
    variance = (squares / count - mean**2) * correction
    scale = torch.rsqrt(variance.clamp(min=0) + 1e-8)
    mean = mean.to(flat.device)
    scale = scale.to(flat.device)
    return [((row.double() - mean) * scale).to(row.dtype) for row in rows]
