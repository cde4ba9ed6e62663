"""slime's log hooks: the same numbers as slime's own, without the bootstrap samples that would blur them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

from rollout.bridge.framework import FRAMEWORK, Sample

_LOGGERS = {
    "slime": ("slime.observability.rollout_metrics", "slime.ray.rollout"),
    "miles": ("miles.ray.rollout",),
}


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Sample],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """slime's `--custom-rollout-log-function-path`: logs the turns only, and the rollout's own metrics.

    Returns True: nothing is left for the framework to log. `rollout_time` is in seconds.
    """
    turns = [sample for sample in samples if (sample.metadata or {}).get("kind") not in ("bootstrap", "padding")]
    _framework_logger("log_rollout_data", "_log_rollout_data")(
        rollout_id, _without(args, "custom_rollout_log_function_path"), turns, rollout_extra_metrics, rollout_time
    )
    return True


def log_eval_rollout(
    rollout_id: int, args: Any, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> bool:
    """slime's `--custom-eval-rollout-log-function-path`: success with its standard error beside slime's numbers."""
    _framework_logger("log_eval_rollout_data", "_log_eval_rollout_data")(
        rollout_id, _without(args, "custom_eval_rollout_log_function_path"), data, extra_metrics
    )
    return True


def _without(args: Any, flag: str) -> Any:
    """`args` as if the hook were not configured, so that the framework's logger does not call it again."""
    plain = copy.copy(args)
    setattr(plain, flag, None)
    return plain


def _framework_logger(*names: str) -> Any:
    for module_name in _LOGGERS.get(FRAMEWORK, ()):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in names:
            if hasattr(module, name):
                return getattr(module, name)
    raise RuntimeError(
        f"the log hooks need slime or miles, found {FRAMEWORK}; leave --custom-rollout-log-function-path out"
    )
