"""The critic's training on each batch: how often (`critic_updates`), and which values the actor gets (`actor_values`).

slime's critic computes its values and the returns once, calls `train` on the batch, and sends the values to the actor.
Here `train` is called several times with the same returns and the same old values, so `--value-clip` bounds how far all
passes together move a value. By default the actor gets the values from before the first pass: after it, the critic has
seen the returns of these very turns, and their advantages shrink. With `actor_values: after`, they are computed again.
Source: SAO (arXiv 2607.07508) trains its critic twice per batch; implementations disagree about the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from advantage.errors import UnsupportedFrameworkError
from advantage.megatron.roles import training_args
from advantage.megatron.versions import Framework, Replace
from advantage.settings import AdvantageSettings


class _Still:
    """A learning-rate schedule that does not advance."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def step(self, increment: int) -> None:
        """Do nothing: the last pass advances the schedule, once per batch."""


def install_critic(framework: Framework, settings: AdvantageSettings, replace: Replace) -> None:
    """Let the critic's process train as the settings say; nothing changes with their defaults.

    Raises:
        UnsupportedFrameworkError: the framework cannot do it.
    """
    passes, after = settings.critic_updates, settings.actor_values == "after"
    if after and framework.name != "slime":
        raise UnsupportedFrameworkError(
            f"{framework.name} sends the critic's values to the actor before the critic trains: use actor_values: "
            "before"
        )
    if framework.actor is None or (passes == 1 and not after):
        return  # there is no training process in a preflight
    if not callable(getattr(framework.actor, "train", None)):
        raise UnsupportedFrameworkError(
            f"{framework.actor.__name__} has no train, so critic_updates and actor_values cannot be changed"
        )
    actor: Any = framework.actor

    def wrapped(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def train_critic(
            rollout_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *rest: Any, **named: Any
        ) -> Any:
            role = getattr(model[0], "role", "actor")
            if role != "critic":
                return train(rollout_id, model, optimizer, opt_param_scheduler, *rest, **named)
            try:
                for number in range(1, passes):
                    model[0].role = f"critic-pass{number}"  # the prefix of its metrics
                    train(rollout_id, model, optimizer, _Still(opt_param_scheduler), *rest, **named)
            finally:
                model[0].role = role
            result = train(rollout_id, model, optimizer, opt_param_scheduler, *rest, **named)
            if after:
                _compute_values(actor, model, *rest[:2])
            return result

        return train_critic

    replace(actor, "train", wrapped)


def _compute_values(actor: Any, model: Any, data_iterator: Any, num_microbatches: Any) -> None:
    """Replace the batch's values by those of the trained critic; slime sends them to the actor next."""
    new = actor.forward_only(actor.get_values, training_args(), model, data_iterator, num_microbatches)
    data_iterator[0].rollout_data.update(new)
