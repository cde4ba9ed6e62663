"""Several passes of the critic over each batch (`critic_updates`).

slime's critic computes its values and the returns once, then calls `train` on the batch. Here `train` is called
several times with the same returns and the same old values, so `--value-clip` bounds how far all passes together move a
value. The actor gets the values from before the first pass: after it, the critic has seen the returns of these very
turns, and their advantages would shrink. Source: SAO (arXiv 2607.07508) trains its critic twice per batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from advantage.errors import UnsupportedFrameworkError
from advantage.megatron.versions import Framework


class _Still:
    """A learning-rate schedule that does not advance."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def step(self, increment: int) -> None:
        """Do nothing: the last pass advances the schedule, once per batch."""


def repeat_critic_updates(
    framework: Framework, passes: int, replace: Callable[[Any, str, Callable[[Any], Any]], None]
) -> None:
    """Let the critic's process train `passes` times on each batch.

    Args:
        replace: replaces a module's function by what it is given, once (`advantage.patch`).

    Raises:
        UnsupportedFrameworkError: the training process's module has no `train`.
    """
    if framework.actor is None:
        return  # a preflight, without a training process
    if not callable(getattr(framework.actor, "train", None)):
        raise UnsupportedFrameworkError(f"{framework.actor.__name__} has no train, so critic_updates cannot be above 1")

    def repeated(train: Callable[..., Any]) -> Callable[..., Any]:
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
            return train(rollout_id, model, optimizer, opt_param_scheduler, *rest, **named)

        return train_critic

    replace(framework.actor, "train", repeated)
