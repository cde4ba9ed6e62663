"""Every number of a run as JSON lines, one row per update and per evaluation, and what they say about the actor."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedded.run.folder import whole_lines
from rollout.bridge.sample import facts_of
from rollout.play.metrics import mean

Row = dict[str, float]


class MetricsLog:
    """A `Tracker` of `embedded.train` that appends rows to a file.

    Each row begins with `update`, `turns` and `seconds`: updates and trained turns so far, and the wall time that
    they took, without evaluations and checkpoints. A resumed run continues these counts.
    """

    def __init__(self, path: Path, turns_before: float = 0.0) -> None:
        self.path, rows = path, read_rows(path)
        self.turns = turns_before + sum(row.get("rollout/turns", 0.0) for row in rows)
        self.seconds = sum(map(update_seconds, rows))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one update."""
        self.turns += metrics.get("rollout/turns", 0.0)
        self.seconds += update_seconds(metrics)
        self._write(rollout_id + 1, metrics)

    def evaluation(self, rollout_id: int, result: Any, weights: Any = None) -> Row:
        """Append and return the means over the held-out episodes, also by task if there are several."""
        means = evaluation_means(held_out(result))
        for task, group in result.data.items() if len(result.data) > 1 else ():
            means[f"eval/{task}/success"] = mean(facts_of(sample)["success"] for sample in group["samples"])
        self._write(rollout_id, means)
        return means

    def _write(self, update: int, metrics: Mapping[str, float]) -> None:
        row = {"update": update, "turns": self.turns, "seconds": self.seconds, **metrics}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def update_seconds(metrics: Mapping[str, float]) -> float:
    """Add up the wall time of one update: waiting for its batch, training, and loading the weights into the engine."""
    return metrics.get("perf/rollout_s", 0.0) + metrics.get("perf/train_s", 0.0)


def held_out(result: Any) -> list[dict[str, Any]]:
    """Return the facts of each held-out episode of an evaluation."""
    return [dict(facts_of(sample)) for group in result.data.values() for sample in group["samples"]]


def evaluation_means(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the means over all episodes, whatever their task."""
    measures = ("success", "return", "progression", "turns")
    means = {f"eval/{key}": mean(facts[key] for facts in episodes) for key in measures}
    return {**means, "eval/episodes": float(len(episodes))}


def read_rows(path: Path) -> list[Row]:
    """Read the rows that a run has written so far; none without a file."""
    return [json.loads(line) for line in whole_lines(path)]


def actor_fault(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Say why the updates in `rows` taught the actor nothing; None if they did."""
    updates = [row for row in rows if "train/actor_trains" in row]
    trained = [row for row in updates if row["train/actor_trains"]]
    norms = [row.get("actor/grad_norm", 0.0) for row in trained]
    if not trained:
        never = f"the actor never trained: only the critic did, in all {len(updates)} updates"
        return f"{never}; raise the number of updates above num_critic_only_steps"
    if not all(math.isfinite(norm) for norm in norms):
        return "the actor's gradient was not finite (see actor/grad_norm); lower lr"
    if not any(norms):
        return f"the actor never changed: its gradient was 0 in all {len(trained)} updates that trained it"
    if not any(row.get("actor/pg_loss") for row in trained):
        return f"the actor learned nothing from rewards: every advantage was 0 in all {len(trained)} updates"
    return None


def reward_note(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Warn if no response was valid, or if two or more batches all paid the same mean reward; None otherwise."""
    valid = [row["turn/valid_action_ratio"] for row in rows if "turn/valid_action_ratio" in row]
    if valid and not any(valid):
        return "no answer was valid, so rewards taught nothing; the policy must imitate longer, or from more episodes"
    rewards = [row["turn/reward"] for row in rows if "turn/reward" in row]
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return None
    same = f"every batch paid the same mean reward, {rewards[0]:g} per turn, so there was nothing to learn from"
    return f"{same}; look at the episodes, and reward progress (a success by chance is needed at least now and then)"
