"""Numbers of one batch, from its turns; every value is a plain float for the framework's trackers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rollout.samples import Segment
from rollout.turn import Turn


def batch_metrics(
    segments: Sequence[Segment], faults: Counter[str], load: tuple[float, float, float]
) -> dict[str, float]:
    """Turn-level metrics of a fixed-turn batch.

    `faults` counts failures and retries of this batch by name; `load` is `EngineLoad.since`: seconds passed,
    seconds with a request in flight, request-seconds. Times are seconds a turn; rewards are as trained on.
    """
    turns = [turn for segment in segments for turn in segment.turns]
    seconds, busy_s, request_s = load
    stops = Counter(segment.stop for segment in segments)
    metrics = {
        "rollout/turns": float(len(turns)),
        "rollout/episodes_touched": float(len(segments)),
        "rollout/turns_per_s": len(turns) / seconds if seconds else 0.0,
        "rollout/engine_busy_share": busy_s / seconds if seconds else 0.0,
        "rollout/engine_concurrency": request_s / seconds if seconds else 0.0,
        **{f"rollout/stop/{stop}": float(count) for stop, count in stops.items()},
        **{f"rollout/faults/{name}": float(count) for name, count in faults.items()},
        **_turn_metrics(turns),
    }
    names = sorted({segment.task_name for segment in segments})
    for name in names:
        mine = [segment for segment in segments if segment.task_name == name]
        prefix = f"task/{name}" if len(names) > 1 else "episode"
        metrics |= {f"{prefix}/{key}": value for key, value in _episode_metrics(mine).items()}
    return metrics


def _turn_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    lengths = [len(turn.generation.token_ids) for turn in turns]
    return {
        "turn/reward": mean(turn.reward for turn in turns),
        "turn/valid_action_ratio": mean(turn.valid for turn in turns),
        "turn/length_stop_ratio": mean(turn.generation.finish_reason == "length" for turn in turns),
        "turn/mixed_weights_ratio": mean(len(set(turn.generation.weight_versions)) > 1 for turn in turns),
        "turn/prompt_tokens": mean(len(turn.prompt.token_ids) for turn in turns),
        "turn/response_tokens": mean(lengths),
        "turn/response_tokens_max": float(max(lengths, default=0)),
        "turn/engine_s": mean(turn.engine_s for turn in turns),
        "turn/env_s": mean(turn.env_s for turn in turns),
        "turn/weight_versions": float(len({v for turn in turns for v in turn.generation.weight_versions})),
    }


def _episode_metrics(segments: Sequence[Segment]) -> dict[str, float]:
    """Of the episodes that ended in this batch; empty if none did."""
    ended = [segment for segment in segments if segment.finished]
    metrics = {"finished": float(len(ended))}
    if not ended:
        return metrics
    metrics |= {
        "return": mean(segment.episode_return for segment in ended),
        "turns": mean(segment.episode_turns for segment in ended),
        "turns_max": float(max(segment.episode_turns for segment in ended)),
        "progression": mean(segment.turns[-1].progression for segment in ended),
        "success": mean(segment.turns[-1].progression >= 1.0 for segment in ended),
    }
    keys = {key for segment in ended for key in segment.turns[-1].metrics}
    for key in sorted(keys):
        metrics[f"env/{key}"] = mean(segment.turns[-1].metrics.get(key, 0.0) for segment in ended)
    return metrics


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0 for nothing."""
    items = [float(value) for value in values]
    return sum(items) / len(items) if items else 0.0
