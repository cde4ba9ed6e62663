"""How often the critic trains on each batch, and which values the actor gets (`critic_updates`,
`actor_values`).

All passes use the returns and old values from before the first one. With `value_pretraining`, the
critic trains on the last batch alone, which has all turns; values and returns are computed again
after each pass and not clipped.
"""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

from advantage.critic import Progress
from advantage.errors import UnsupportedFrameworkError
from advantage.exchange import current_layout
from advantage.patch.versions import Slime, wrap
from advantage.saved_critic import RECORD, pretrained_record
from advantage.settings import AdvantageSettings, ValuePretrainingSettings, advantage_settings
from advantage.training.alarms import critic_alarm
from advantage.values import take_metrics


def _still(schedule: Any) -> Any:
    """Copy a learning-rate schedule that does not advance: only the last pass on a batch advances
    it."""
    still = copy.copy(schedule)
    still.step = lambda increment=0: None
    return still


def install_critic(slime: Slime, settings: AdvantageSettings) -> None:
    """Let the critic's process train as the settings say; raises UnsupportedFrameworkError if slime
    has no `train`."""
    passes = settings.critic_updates
    after = settings.actor_values == "after"
    if slime.actor is None or (passes == 1 and not after):
        return  # only a preflight, or nothing to change
    actor: Any = slime.actor

    def train_critic(
        train: Callable[..., Any],
        rollout_id: int,
        model: Any,
        optimizer: Any,
        schedule: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        role = getattr(model[0], "role", "actor")
        if role != "critic":
            return train(rollout_id, model, optimizer, schedule, *rest, **named)
        try:
            for number in range(1, passes):
                model[0].role = f"critic-pass{number}"  # the prefix of its metrics
                train(rollout_id, model, optimizer, _still(schedule), *rest, **named)
        finally:
            model[0].role = role
        result = train(rollout_id, model, optimizer, schedule, *rest, **named)
        if after:  # slime sends the values to the actor next
            role_args = sys.modules["megatron.training.global_vars"].get_args()
            _compute_values(role_args, actor, model, *rest[:2])
        return result

    wrap(actor, "train", train_critic)


def _compute_values(
    args: Any, actor: Any, model: Any, data_iterator: Any, num_microbatches: Any
) -> None:
    new = actor.forward_only(actor.get_values, args, model, data_iterator, num_microbatches)
    data_iterator[0].rollout_data.update(new)


def pretrain_critic(args: Any, slime: Slime, settings: ValuePretrainingSettings) -> None:
    """Let the critic's process only collect until the last batch, then train on it until it has
    converged."""
    actor = slime.actor
    if actor is None:
        return  # a preflight, without a training process
    missing = [
        name for name in ("forward_only", "get_values") if not callable(getattr(actor, name, None))
    ]
    if missing:
        raise UnsupportedFrameworkError(
            f"{actor.__name__} has no {missing[0]}, which value_pretraining needs"
        )

    def all_passes(
        train: Callable[..., Any],
        rollout_id: int,
        model: Any,
        optimizer: Any,
        schedule: Any,
        iterator: Any,
        *rest: Any,
    ) -> None:
        if rollout_id + 1 < settings.batches:
            return
        args.value_clip = math.inf
        data = iterator[0].rollout_data
        progress = Progress()
        layout = current_layout()
        critic_alarm().watch(take_metrics(data), rollout_id)
        while progress.begin_pass(settings, data, model, layout):
            _log(args, slime, progress)
            # The pass counts as a rollout, so that its metrics are logged after those of the one
            # before.
            number = rollout_id + len(progress.explained) - 1
            with progress.held_out_hidden(data):
                train(number, model, optimizer, _still(schedule), iterator, *rest)
            _compute_values(args, actor, model, iterator, rest[0])  # the microbatches
            actor.compute_advantages_and_returns(args, data)
            take_metrics(data)  # the critic has trained on these turns
        _log(args, slime, progress)
        progress.finish(settings, model)
        record = pretrained_record(
            advantage_settings(args), progress.explained, progress.best, data, layout
        )
        setattr(args, RECORD, record)  # slime saves its arguments with the model
        optimizer.reload_model_params()

    wrap(actor, "train", all_passes)


def _log(args: Any, slime: Slime, progress: Progress) -> None:
    """Send the last measurement to slime's tracking, which runs on one rank."""
    if slime.actor is None or slime.model is None or not slime.actor.is_megatron_main_rank():
        return
    metrics = {"train/critic-held_out_explained_variance": progress.explained[-1]}
    step = {"critic/pass": len(progress.explained) - 1}
    slime.model.logging_utils.log(args, {**metrics, **step}, step_key="critic/pass")
