"""slime's log hooks: slime's own metrics computed without bootstrap samples, and metrics of turns
and episodes."""

import copy
import importlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollout.batches.metrics import whole_episode_metrics
from rollout.bridge.framework import Sample
from rollout.bridge.sample import facts_of
from rollout.bridge.whole_episodes import episode_facts
from rollout.play.parts import FAULTS
from rollout.play.runtime import open_runtimes
from rollout.turn import SampleKind

_LOGGERS = {"slime.observability.rollout_metrics": "", "slime.ray.rollout": "_"}
"""Where main and v0.3.1 have their loggers, and how the names begin there."""


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Sample],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """slime's `--custom-rollout-log-function-path`: logs slime's metrics of the turns, and the
    rollout's own metrics.

    slime's loop passes no metrics for whole episodes (`rollout.generate`), so they are computed
    from the samples. `rollout_time` is in seconds. Returns True, which tells slime that everything
    is logged.
    """
    metrics = dict(rollout_extra_metrics or {})
    episodes = whole_episode_metrics(episode_facts(samples))
    if episodes and "rollout/turns" not in metrics:
        metrics |= episodes
        # Since the last call, those of evaluations included.
        faults = sum((runtime.new_faults() for runtime in open_runtimes()), Counter[str]())
        metrics |= {
            f"rollout/faults/{name}": float(faults[name]) for name in sorted({*FAULTS, *faults})
        }
    fillers = (SampleKind.BOOTSTRAP, SampleKind.PADDING)
    turns = [sample for sample in samples if facts_of(sample).get("kind") not in fillers]
    log = _slime_logger("log_rollout_data")
    log(
        rollout_id, _without(args, "custom_rollout_log_function_path"), turns, metrics, rollout_time
    )
    return True


def log_eval_rollout(
    rollout_id: int,
    args: Any,
    data: dict[str, dict[str, Any]],
    extra_metrics: dict[str, Any] | None = None,
) -> bool:
    """slime's `--custom-eval-rollout-log-function-path`: adds success with its standard error to
    slime's metrics."""
    extra_metrics = dict(extra_metrics or {})
    for name, results in data.items():
        if f"eval/{name}/episodes" not in extra_metrics:
            found = whole_episode_metrics(episode_facts(results.get("samples") or ()))
            extra_metrics |= {
                f"eval/{name}/{key.partition('/')[2]}": value for key, value in found.items()
            }
    log = _slime_logger("log_eval_rollout_data")
    log(rollout_id, _without(args, "custom_eval_rollout_log_function_path"), data, extra_metrics)
    return True


def _without(args: Any, flag: str) -> Any:
    """A copy of `args` without the hook, because slime's logger would call it again."""
    plain = copy.copy(args)
    setattr(plain, flag, None)
    return plain


def _slime_logger(name: str) -> Any:
    for module, beginning in _LOGGERS.items():
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), beginning + name)
    raise RuntimeError(
        "the log hooks need slime, which cannot be imported; leave the flags with log hooks out"
    )
