"""Metrics of one batch, computed from its turns; every value is a float, as slime's trackers want
it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.play.engine_loads import EngineLoad
from rollout.play.parts import FAULTS, count_retries
from rollout.turn import FinishReason, NotesEvent, Segment, StopReason, Turn
from rollout.workers.utilization import ProcessUsage, Usage


@dataclass(frozen=True)
class BatchLoad:
    """How busy engine and environment workers were during a batch, and the CPU time of the event
    loops."""

    engine: Usage
    env: Usage
    host_s: float
    """CPU seconds of the event loops' threads."""
    processes: Sequence[ProcessUsage] = ()
    """Each process: this one, then the players."""
    engines: Mapping[int, EngineLoad] = field(default_factory=dict)
    """Each engine that tells its load."""


def batch_metrics(
    segments: Sequence[Segment],
    faults: Counter[str],
    load: BatchLoad,
    stale: Sequence[int],
    tasks: int = 1,
) -> dict[str, float]:
    """Return the turn-level metrics of a batch. Times are in seconds per turn.

    Args:
        faults: failures and retries of this batch by name.
        stale: for each turn, the actor updates between playing and training it; -1 if unknown.
        tasks: of the run; with several, the names of episode metrics have the task, even if one
            alone is in the batch.
    """
    turns = [turn for segment in segments for turn in segment.turns]
    played = [turn for turn in turns if turn.stepped]
    stops = Counter(segment.stop for segment in segments)
    ended = [segment.episode_turns for segment in segments if segment.stop.is_end]
    metrics = {
        "rollout/turns": float(len(turns)),
        "rollout/turns_retried": float(count_retries(faults)),
        "rollout/episodes_touched": float(len(segments)),
        "rollout/episodes_finished": float(len(ended)),
        "rollout/episodes_cut": float(stops[StopReason.CUT]),
        "rollout/episodes_failed": float(faults["episodes_failed"]),
        **_ends(ended, stops),
        **{f"rollout/faults/{name}": float(faults[name]) for name in sorted({*FAULTS, *faults})},
        **_load_metrics(load, len(turns)),
        **_turn_metrics(played, turns, stale),
        **_notes_metrics(count_notes(played), sum(turn.valid for turn in played)),
        **_summary_metrics([turn.summary for turn in turns if turn.summary is not None]),
    }
    names = sorted({segment.task_name for segment in segments})
    for name in names:
        mine = [segment for segment in segments if segment.task_name == name]
        prefix = f"task/{name}" if max(len(names), tasks) > 1 else "episode"
        metrics |= {f"{prefix}/{key}": value for key, value in _episode_metrics(mine).items()}
    return metrics


def _load_metrics(load: BatchLoad, turns: int) -> dict[str, float]:
    engine = load.engine
    env = load.env
    seconds = load.engine.seconds
    return {
        "rollout/turns_per_s": turns / seconds if seconds else 0.0,
        "rollout/engine_busy_share": engine.busy_s / seconds if seconds else 0.0,
        "rollout/engine_concurrency": engine.request_s / seconds if seconds else 0.0,
        "rollout/env_busy_share": env.busy_s / seconds if seconds else 0.0,
        "rollout/env_queue_depth": env.request_s / seconds if seconds else 0.0,
        "rollout/host_busy_share": max((one.cpu_s for one in load.processes), default=0.0)
        / (seconds or 1.0),
        "turn/host_s": load.host_s / turns if turns else 0.0,
        **_process_metrics(load.processes[1:], seconds or 1.0),
        **{
            f"rollout/engine/{k}/{name}": x
            for k, one in load.engines.items()
            for name, x in one._asdict().items()
        },
    }


def _process_metrics(players: Sequence[ProcessUsage], seconds: float) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for number, player in enumerate(players):
        found = {
            "host_busy_share": player.cpu_s / seconds,
            "engine_concurrency": player.engine.request_s / seconds,
            "env_queue_depth": player.env.request_s / seconds,
            "turns_retried": float(player.retries),
        }
        metrics |= {f"rollout/process/{number}/{name}": value for name, value in found.items()}
    return metrics


def _turn_metrics(
    turns: Sequence[Turn], trained: Sequence[Turn], stale: Sequence[int]
) -> dict[str, float]:
    """Metrics of the environment's `turns`; all `trained` turns have a staleness and weight
    versions."""
    lengths = [len(turn.generation.token_ids) for turn in turns]
    stale = [
        updates
        for turn, updates in zip(trained, stale, strict=False)
        if turn.generation.trained and updates >= 0
    ]
    return {
        "turn/reward": mean(turn.reward for turn in turns),
        "turn/valid_action_ratio": mean(turn.valid for turn in turns),
        "turn/length_stop_ratio": mean(
            turn.generation.finish_reason is FinishReason.LENGTH for turn in turns
        ),
        "turn/mixed_weights_ratio": mean(
            len(set(turn.generation.weight_versions)) > 1 for turn in turns
        ),
        "turn/prompt_tokens": mean(len(turn.prompt.token_ids) for turn in turns),
        "turn/response_tokens": mean(lengths),
        "turn/response_tokens_max": float(max(lengths, default=0)),
        "turn/engine_s": mean(turn.engine_s for turn in turns),
        "turn/engine_s_max": max((turn.engine_s for turn in turns), default=0.0),
        "turn/env_s": mean(turn.env_s for turn in turns),
        "turn/env_s_max": max((turn.env_s for turn in turns), default=0.0),
        "turn/staleness": mean(stale),
        "turn/staleness_max": float(max(stale, default=0)),
        "turn/off_policy_ratio": mean(updates > 0 for updates in stale),
        "turn/weight_versions": float(
            len({v for turn in trained for v in turn.generation.weight_versions})
        ),
    }


def count_notes(turns: Iterable[Turn]) -> dict[str, int]:
    """Number of turns per `NotesEvent`; empty if the memory does not ask for notes."""
    asked = [turn for turn in turns if turn.notes is not None]
    return (
        {str(event): sum(event in turn.notes_events for turn in asked) for event in NotesEvent}
        if asked
        else {}
    )


def _notes_metrics(counts: Mapping[str, int], valid: int) -> dict[str, float]:
    return {f"turn/notes_{event}_ratio": count / max(valid, 1) for event, count in counts.items()}


def _summary_metrics(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the turns in which the model wrote its notes; facts and copies only over those
    that have any."""
    if not summaries:
        return {}
    names = sorted({name for summary in summaries for name in summary})
    means = {f"summary/{name}": mean(s[name] for s in summaries if name in s) for name in names}
    return {"summary/turns": float(len(summaries)), **means}


def _episode_metrics(segments: Sequence[Segment]) -> dict[str, float]:
    """Metrics of the episodes that ended in this batch; only their number if none did."""
    ended = [segment for segment in segments if segment.stop.is_end]
    if not ended:
        return {"finished": 0.0}
    metrics = {
        "finished": float(len(ended)),
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


def whole_episode_metrics(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Turn counts, stop reasons and outcomes of whole episodes, from `episode_facts`; empty without
    episodes."""
    if not episodes:
        return {}
    played = [facts for facts in episodes if facts["stop"] != StopReason.FAILED]
    lengths = [facts["episode_turns"] for facts in played]
    stops = Counter(facts["stop"] for facts in episodes)
    turns = sum(lengths)
    paid = sum(facts["episode_return"] for facts in played)
    valid = sum(facts["valid_turns"] for facts in played)
    notes = Counter[str]()
    for facts in played:
        notes.update(facts.get("notes_events", {}))
    return {
        "rollout/turns": float(turns),
        "rollout/episodes_finished": float(len(played)),
        "rollout/episodes_failed": float(stops[StopReason.FAILED]),
        **_ends(lengths, stops),
        "episode/finished": float(len(played)),
        "episode/return": paid / max(len(played), 1),
        "episode/turns": mean(lengths),
        "episode/success": mean(facts["success"] for facts in played),
        "turn/reward": paid / max(turns, 1),
        "turn/valid_action_ratio": valid / max(turns, 1),
        "turn/length_stop_ratio": sum(facts["length_stops"] for facts in played) / max(turns, 1),
        **_notes_metrics(notes, valid),
        **_summary_metrics([summary for facts in played for summary in facts.get("summaries", ())]),
    }


def _ends(lengths: Sequence[int], stops: Counter[StopReason]) -> dict[str, float]:
    return {
        "rollout/episode_turns_mean": mean(lengths),
        "rollout/episode_turns_p50": quantile(lengths, 0.5),
        "rollout/episode_turns_p95": quantile(lengths, 0.95),
        "rollout/episode_turns_max": float(max(lengths, default=0)),
        **{f"rollout/stop/{stop}": float(stops[stop]) for stop in StopReason},
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed; 0 if there are no
    values."""
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if ordered else 0.0


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0 if there are no values."""
    items = [float(value) for value in values]
    return sum(items) / len(items) if items else 0.0
