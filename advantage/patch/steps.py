"""Wraps what slime does around a training step: weights, micro-batches, the loss, and the metrics.

`install` wraps it all before the model is built. Without `--custom-megatron-init-path`,
`advantage.group` wraps it when it computes the first advantages; only the weights of the first push
are out of reach by then.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from advantage.patch.versions import ACTOR, MODEL, original, wrap
from advantage.settings import AdvantageSettings
from advantage.training.alarms import check_finite, critic_alarm, off_policy_alarm
from advantage.training.images import expand
from advantage.training.losses import turn_weights
from advantage.training.policy_loss import finish_dis
from advantage.turn_table import PADDING_INDEX, STALENESS
from advantage.values import take_metrics

GetBatch = Callable[..., dict[str, Any]]
TrainOneStep = Callable[..., tuple[dict[str, Any], Any]]
Loss = tuple[Tensor, Tensor, dict[str, Any]]
"""The loss of a micro-batch, its number of tokens, and what slime logs."""
_STEP_LENGTHS = ("global_batch_sizes", "num_microbatches")
"""Columns of slime's rollout data with one entry per optimizer step."""


def install_late(settings: AdvantageSettings) -> None:
    """Wrap the training steps of this process, unless they are wrapped or slime does not run in
    it."""
    model = sys.modules.get(MODEL)
    if model is not None and original(model.train_one_step) is model.train_one_step:
        install_steps(model, sys.modules.get(ACTOR), settings)


def install_steps(model: ModuleType, actor: ModuleType | None, settings: AdvantageSettings) -> None:
    """Wrap functions of slime's `model` and `actor` modules; raises UnsupportedFrameworkError if
    one is missing."""
    alarms = off_policy_alarm(settings), critic_alarm()

    def extended(
        get_batch: GetBatch, data_iterator: Any, keys: Sequence[str], *args: Any, **named: Any
    ) -> dict[str, Any]:
        batch = get_batch(data_iterator, [*keys, STALENESS], *args, **named)
        if batch.get("multimodal_train_inputs"):
            batch["multimodal_train_inputs"] = expand(batch["multimodal_train_inputs"])
        return batch

    def watched(
        train_one_step: TrainOneStep, args: Any, rollout_id: int, *rest: Any, **named: Any
    ) -> tuple[dict[str, Any], Any]:
        measured = _measured(*rest)
        metrics, norm = train_one_step(args, rollout_id, *rest, **named)
        if getattr(args, "check_for_nan_in_loss_and_grad", True):
            # Megatron itself looks at gradients alone.
            check_finite(metrics, rollout_id)
        metrics = finish_dis(metrics) | measured
        for alarm in alarms:
            metrics |= alarm.watch(metrics, rollout_id)
        return metrics, norm

    wrap(model, "get_batch", extended)
    wrap(model, "train_one_step", watched)
    wrap(model, "loss_function", _count_turns)
    logger = getattr(actor, "train_metric_utils", actor)  # v0.3.1 imports the function into `actor`
    if hasattr(logger, "log_rollout_data"):
        wrap(logger, "log_rollout_data", _log_without_padding)
    backuper = getattr(actor, "TensorBackuper", None)
    if backuper is not None:
        wrap(backuper, "create", _create_returning)


def _measured(
    _step: int = 0, iterators: Sequence[Any] = (), models: Sequence[Any] = (), *_: Any
) -> dict[str, float]:
    """What the hook measured on the critic's batch, in the first step of its last pass over the
    batch."""
    is_critic = bool(models) and getattr(models[0], "role", None) == "critic"
    return take_metrics(iterators[0].rollout_data) if is_critic else {}


def _create_returning(create: Callable[..., Any], **named: Any) -> Any:
    """Make slime's copies of models such that the model has the actor's weights again after another
    copy is made.

    slime reads the reference and the teacher into the actor's model before it copies them. Where
    training is not offloaded, it leaves the last of them there, and pushes it to the engines before
    the first batch. The training process itself cannot be patched, because Ray copies its methods.
    """
    copies = create(**named)
    backup = copies.backup

    def returning(tag: str) -> None:
        backup(tag)
        if tag != "actor" and "actor" in copies.backup_tags:
            copies.restore("actor")

    copies.backup = returning
    return copies


def _count_turns(
    loss_function: Callable[..., Loss], args: Any, batch: Any, *rest: Any, **named: Any
) -> Loss:
    """Correct what the turns of a sample weigh in the loss.

    A sample of several turns counts as those turns would alone. With `--calculate-per-token-loss`,
    all tokens weigh the same; there slime counts one token too many for each sample without trained
    tokens, such as a bootstrap sample.
    """
    if not args.calculate_per_token_loss:
        weights = list(map(turn_weights, batch["loss_masks"], batch["rollout_mask_sums"]))
        return loss_function(args, {**batch, "loss_masks": weights}, *rest, **named)
    loss, count, log = loss_function(args, batch, *rest, **named)
    empty = sum(1 - mask.bool().any().long() for mask in batch["loss_masks"])
    values = log["values"].clone()
    # Never exactly 0, because slime divides the metrics of a step by the sum.
    values[0] = (values[0] - empty).clamp(min=torch.finfo(values.dtype).tiny)
    return loss, count - empty, {**log, "values": values}


def _log_without_padding(
    log: Callable[..., None], rollout_id: int, args: Any, data: Mapping[str, Any]
) -> None:
    log(rollout_id, args, without_padding(data))


def without_padding(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave the samples that only fill an optimizer step out of a rank's columns; one stays if
    there is nothing else.

    `raw_reward` has the samples of all ranks; the converter gives padding a reward that does not
    change the mean.
    """
    indices = data.get("sample_indices") or ()
    if PADDING_INDEX not in indices:
        return data
    kept = [place for place, index in enumerate(indices) if index != PADDING_INDEX] or [0]
    found = dict(data)
    for key, column in data.items():
        is_number = isinstance(column, Tensor) and column.dim() == 0
        if is_number or key in _STEP_LENGTHS or len(column) != len(indices):
            continue
        found[key] = [column[place] for place in kept]
    return found
