"""The critic's head: where it is in a model of images, and the bins of `value_loss: hl_gauss`
instead of one output.

slime's functions see values, [1, T, 1]: `get_values` gets the expectations of the bins. Only the
head, which slime builds with one output, and the value loss see the bins. All settings are read
when a function is called.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.errors import UnsupportedFrameworkError
from advantage.hl_gauss import hl_gauss_of
from advantage.patch.versions import Slime, replace, wrap
from advantage.settings import advantage_settings
from advantage.training.losses import Reducer, ValueLoss, weigh_first_tokens

PROVIDER = "slime.backends.megatron_utils.model_provider"


def install_value_head(args: Any, slime: Slime) -> None:
    """Let slime build, start, read and train the head that the settings ask for; first tokens weigh
    more in its loss.

    Raises UnsupportedFrameworkError if this slime builds its critics in another way and the
    settings ask for bins.
    """
    replace(
        slime.loss,
        "value_loss_function",
        lambda old: weigh_first_tokens(_value_loss(slime.loss, old)),
    )
    provider = sys.modules.get(PROVIDER)
    if hasattr(provider, "freeze_model_params"):
        # The last thing that is done to a model before DDP.
        wrap(provider, "freeze_model_params", _move_head)
    parts = (
        (provider, "LinearForLastLayer"),
        (slime.model, "_reinitialize_critic_output_layer"),
        (slime.loss, "get_values"),
        (slime.actor, "get_values"),
    )
    missing = [name for module, name in parts if not hasattr(module, name)]
    if missing and slime.actor is not None and hl_gauss_of(advantage_settings(args)) is not None:
        raise UnsupportedFrameworkError(
            f"slime has no {missing[0]}, which value_loss: hl_gauss needs; use mse"
        )
    if missing or provider is None:
        return
    replace(
        provider,
        "LinearForLastLayer",
        lambda linear: functools.partial(_head, provider, linear, args),
    )
    wrap(slime.model, "_reinitialize_critic_output_layer", _start_again)
    for module in (slime.loss, slime.actor):
        wrap(module, "get_values", _expected_values)


def _move_head(freeze: Callable[..., None], model: Any, args: Any) -> None:
    """Move the head of a critic with a `language_model` into it: slime puts it on the model around
    it, unused."""
    if hasattr(model, "language_model") and "output_layer" in model._modules:
        head = model.language_model.output_layer = model._modules.pop("output_layer")
        # Unregistered, because slime compares its shape with the checkpoint's.
        model.__dict__["output_layer"] = head
    freeze(model, args)


def _head(
    provider: ModuleType, linear: Any, args: Any, *, input_size: int, output_size: int, **named: Any
) -> Any:
    """Build slime's head with one output, or one with the bins of the settings."""
    bins = hl_gauss_of(advantage_settings(args))
    if bins is None:
        return linear(input_size=input_size, output_size=output_size, **named)
    gather = provider.tensor_parallel.gather_from_sequence_parallel_region

    class HistogramHead(linear):
        """Slime's head with one output per bin, which multiplies in float32: bf16 would move values
        by 0.3 %."""

        def start(self) -> None:
            """Begin with equal outputs for all hidden states, whose value is 0."""
            self.weight.data.zero_()
            self.bias.data.copy_(bins.start_bias())

        def forward(
            self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None
        ) -> tuple[Tensor, None]:
            logits = F.linear(input_.float(), self.weight.float(), self.bias.float())
            if self.sequence_parallel:
                logits = gather(logits, tensor_parallel_output_grad=False)
            return logits, None

    head = HistogramHead(input_size=input_size, output_size=bins.bins, **named)
    head.start()
    return head


def _start_again(start: Callable[..., None], args: Any, model: Any) -> None:
    """Start the head anew where slime does, because the checkpoint is an actor's."""
    start(args, model)
    for module in sys.modules[start.__module__].unwrap_model(model):
        head: Any = getattr(module, "output_layer", None)
        if hasattr(head, "start"):
            head.start()


def _expected_values(
    get_values: Callable[..., Any], logits: Tensor, *rest: Any, **named: Any
) -> Any:
    head = hl_gauss_of(advantage_settings(named["args"]))
    if head is not None:
        logits = head.expectation(logits)[..., None]
    return get_values(logits, *rest, **named)


def _value_loss(loss: ModuleType, squared: ValueLoss) -> ValueLoss:
    """Replace slime's squared error where the critic has bins; nothing is clipped then."""

    @functools.wraps(squared)
    def value_loss(
        args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = hl_gauss_of(advantage_settings(args))
        if head is None:
            return squared(args, batch, logits, sum_of_sample_mean)
        columns = {
            key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")
        }
        rows = loss.get_responses(logits, args=args, apply_temperature=False, **columns)
        predicted = torch.cat([row for row, _ in rows])
        total = sum_of_sample_mean(head.loss(predicted, torch.cat(batch["returns"])))
        total = total + 0 * logits.sum()  # a rank without tokens takes part in the backward pass
        return total, {"value_loss": total.detach().clone()}

    return value_loss
