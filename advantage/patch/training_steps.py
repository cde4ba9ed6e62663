"""What the patch adds around slime's micro-batches and training steps: images, staleness, and checks of metrics."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from advantage.errors import UnsupportedFrameworkError
from advantage.patch.versions import Replace
from advantage.settings import AdvantageSettings
from advantage.training.alarms import OffPolicyAlarm
from advantage.training.images import expand
from advantage.training.policy_loss import finish_dis
from advantage.turn_table import STALENESS


def install_training_steps(model: ModuleType, settings: AdvantageSettings, replace: Replace) -> None:
    """Wrap `get_batch` and `train_one_step` in the framework's module with the forward passes."""
    for name in ("get_batch", "train_one_step"):
        if not callable(getattr(model, name, None)):
            raise UnsupportedFrameworkError(f"{model.__name__} has no {name}, which the patch has to wrap")
    alarm = OffPolicyAlarm(settings)

    def extending(get_batch: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(get_batch)
        def extended(data_iterator: Any, keys: Sequence[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
            batch = get_batch(data_iterator, [*keys, STALENESS], *args, **kwargs)
            if batch.get("multimodal_train_inputs"):
                batch["multimodal_train_inputs"] = expand(batch["multimodal_train_inputs"])
            return batch

        return extended

    def watching(train_one_step: Callable[..., tuple[dict[str, Any], Any]]) -> Callable[..., Any]:
        @functools.wraps(train_one_step)
        def watched(args: Any, rollout_id: int, *rest: Any, **named: Any) -> tuple[dict[str, Any], Any]:
            metrics, norm = train_one_step(args, rollout_id, *rest, **named)
            metrics = finish_dis(metrics)
            return metrics | alarm.watch(metrics, rollout_id), norm

        return watched

    replace(model, "get_batch", extending)
    replace(model, "train_one_step", watching)
