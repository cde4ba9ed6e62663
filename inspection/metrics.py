"""slime's log hooks: the same numbers as slime's own, without the bootstrap samples that would blur them."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.bridge.framework import FRAMEWORK, Sample
from rollout.play.metrics import FAULTS, mean, quantile
from rollout.play.runtime import Runtime, open_runtimes
from rollout.turn import StopReason

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

    Whole episodes (`rollout.generate`) bring no metrics of their own through slime's loop; theirs are read from the
    samples. Returns True: nothing is left for the framework to log. `rollout_time` is in seconds.
    """
    metrics = dict(rollout_extra_metrics or {})
    episodes = episode_metrics(samples)
    if episodes and "rollout/turns" not in metrics:
        metrics |= episodes
        metrics |= {f"rollout/faults/{name}": value for name, value in new_faults(open_runtimes()).items()}
    turns = [sample for sample in samples if (sample.metadata or {}).get("kind") not in ("bootstrap", "padding")]
    _framework_logger("log_rollout_data", "_log_rollout_data")(
        rollout_id, _without(args, "custom_rollout_log_function_path"), turns, metrics, rollout_time
    )
    return True


def log_eval_rollout(
    rollout_id: int, args: Any, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> bool:
    """slime's `--custom-eval-rollout-log-function-path`: success with its standard error beside slime's numbers."""
    extra_metrics = dict(extra_metrics or {})
    for name, results in data.items():
        if f"eval/{name}/episodes" not in extra_metrics:
            found = episode_metrics(results.get("samples") or ())
            extra_metrics |= {f"eval/{name}/{key.partition('/')[2]}": value for key, value in found.items()}
    _framework_logger("log_eval_rollout_data", "_log_eval_rollout_data")(
        rollout_id, _without(args, "custom_eval_rollout_log_function_path"), data, extra_metrics
    )
    return True


def episode_metrics(samples: Iterable[Sample | Sequence[Sample]]) -> dict[str, float]:
    """Turn counts, stop reasons and outcomes of whole episodes; empty if the samples are not of whole episodes.

    An episode's samples share slime's index and each tells of the whole episode, so it counts once.
    """
    flat = [part for sample in samples for part in (sample if isinstance(sample, list) else [sample])]
    episodes: dict[Any, Mapping[str, Any]] = {}
    for number, sample in enumerate(flat):
        facts = sample.metadata or {}
        if "stop" in facts and ("episode_turns" in facts or facts["stop"] == "failed"):
            episodes[number if sample.index is None else sample.index] = facts
    if not episodes:
        return {}
    played = [facts for facts in episodes.values() if "episode_turns" in facts]
    lengths = [facts["episode_turns"] for facts in played]
    stops = Counter(facts["stop"] for facts in episodes.values())
    turns = sum(lengths)
    return {
        "rollout/turns": float(turns),
        "rollout/episodes_finished": float(len(played)),
        "rollout/episodes_failed": float(stops["failed"]),
        "rollout/episode_turns_mean": mean(lengths),
        "rollout/episode_turns_p50": quantile(lengths, 0.5),
        "rollout/episode_turns_p95": quantile(lengths, 0.95),
        "rollout/episode_turns_max": float(max(lengths, default=0)),
        "episode/return": mean(facts["episode_return"] for facts in played),
        "episode/success": mean(facts["success"] for facts in played),
        "turn/valid_action_ratio": sum(facts["valid_turns"] for facts in played) / max(turns, 1),
        "turn/length_stop_ratio": sum(facts["length_stops"] for facts in played) / max(turns, 1),
        **{f"rollout/stop/{stop}": float(stops[stop]) for stop in StopReason},
    }


def new_faults(runtimes: Iterable[Runtime]) -> dict[str, float]:
    """What failed or was tried again since the last call, by name; evaluations in between included."""
    found: Counter[str] = Counter()
    for runtime in runtimes:
        now = runtime.fault_counts()
        found += now - runtime.logged
        runtime.logged = now
    return {name: float(found[name]) for name in sorted({*FAULTS, *found})}


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
