"""What a run writes: summary, metrics, policies, and the records of its held-out episodes."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from embedded.engine.decoder import Weights, write_policy
from embedded.run import record
from embedded.run.alarms import Alarms
from embedded.run.ending import (
    describe_played,
    is_better,
    judge,
    played,
    setting_of,
    spread,
    win_rate,
)
from embedded.run.folder import (
    EPISODES,
    METRICS,
    SUMMARY,
    append_text,
    keep_lines,
    rewind,
    saved_updates,
    whole_lines,
    write_text,
)
from rollout.batches.metrics import mean
from rollout.play.transcript import RECORD_KEYS

LINE = (
    ("reward/turn", "turn/reward", ".3f"),
    ("ended", "episode/finished", ".0f"),
    ("won", "episode/success", ".0%"),
    ("turns/episode", "episode/turns", ".1f"),
    ("valid", "turn/valid_action_ratio", ".2f"),
    ("value loss", "critic/value_loss", ".4f"),
    ("KL", "actor/ref_kl", ".3f"),
    ("entropy", "actor/entropy", ".2f"),
)


@dataclass
class RunReport:
    """A `Tracker` of `embedded.train` that collects a run's numbers and writes them into one
    folder.

    In a folder with a checkpoint, what was written after it is dropped, and the rest is read back.
    """

    folder: Path
    about: Mapping[str, Any]
    policy: str | Path
    """Hugging Face folder of the policy that training starts from."""
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Held-out episodes by the number of updates that came before them."""
    began: float = field(default_factory=time.monotonic)
    """When this session began, less the time of earlier ones, up to each one's last update."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / METRICS
        times = [row.get("wall_time_s", 0.0) for row in record.read_rows(log)]
        self.began -= max(times, default=0.0)
        saved = saved_updates(self.folder)
        rewind(log, saved)
        rows = record.read_rows(log)
        self.history += [row for row in rows if "train/actor_trains" in row]
        evaluated = {int(row["update"]) for row in rows if "eval/episodes" in row}
        kept = []
        for line in whole_lines(self.folder / EPISODES):
            episode = json.loads(line)
            updates = int(episode["setting"].removeprefix(setting_of("")))
            if updates in evaluated:
                kept.append(line)
                self.evaluations.setdefault(updates, []).append(episode)
        keep_lines(self.folder / EPISODES, kept)
        (self.folder / SUMMARY).unlink(missing_ok=True)  # of an interrupted session of this run
        self._log = record.MetricsLog(log)
        self._alarms = Alarms()
        for row in self.history:
            self._alarms.watch(int(row["update"]), row)

    def _best(self) -> int:
        """Return the updates before the best policy: each evaluation is compared with the best one
        before it."""
        best, *others = sorted(self.evaluations)
        for updates in others:
            if is_better(self.evaluations[updates], self.evaluations[best]):
                best = updates
        return best

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record one update and print its line."""
        self.history.append({"update": rollout_id + 1, **metrics})
        self._log.update(rollout_id, {**metrics, "wall_time_s": self._wall_time()})
        parts = [f"update {rollout_id + 1:3d}"]
        parts += [f"{name} {metrics[key]:{form}}" for name, key, form in LINE if key in metrics]
        parts.append(f"{record.update_seconds(metrics):.1f} s")
        tqdm.write("  ".join(parts))
        for sentence in self._alarms.watch(rollout_id + 1, metrics):
            tqdm.write(f"warning: {sentence}")

    def evaluation(self, rollout_id: int, result: Any, weights: Weights) -> None:
        """Record held-out episodes, played after `rollout_id` updates, and keep the policy that
        played them."""
        episodes = self.evaluations[rollout_id] = record.held_out(result)
        if rollout_id:
            write_policy(self.policy, weights, self.folder / "policy_after")
        if self._best() == rollout_id:
            write_policy(self.policy, weights, self.folder / "policy_best")
        about = {"setting": setting_of(rollout_id), "player": "policy"}
        lines = []
        for episode in episodes:
            kept = {**about, **{key: episode[key] for key in RECORD_KEYS}}
            lines.append(json.dumps(kept, ensure_ascii=False, default=str) + "\n")
        append_text(self.folder / EPISODES, "".join(lines))
        self._log.evaluation(rollout_id, result)  # last: the row says that the rest is there
        tqdm.write(f"held-out episodes after {rollout_id} updates: {describe_played(episodes)}")

    def write(self, *, interrupted_after: int | None = None) -> dict[str, Any]:
        """Write all files and return the summary; before the first evaluation, there is only the
        summary.

        An interrupted run is not judged, and has only the updates that it can continue after.
        """
        self.history = self.history[:interrupted_after]
        interrupted = interrupted_after is not None
        actor_updates = [row for row in self.history if row.get("train/actor_trains")]
        turns = sum(row.get("rollout/turns", 0) for row in self.history)
        summary = {
            **self.about,
            "interrupted": interrupted,
            "updates": len(self.history),
            "actor_updates": len(actor_updates),
            "fault": None if interrupted else record.actor_fault(self.history),
            "note": None if interrupted else record.reward_note(self.history),
            "alarms": self._alarms.raised,
            "turns": int(turns),
            "wall_time_s": self._wall_time(),
        }
        if self.evaluations:
            summary |= self._results()
        write_text(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _wall_time(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def _results(self) -> dict[str, Any]:
        first = played(self.evaluations[min(self.evaluations)])
        last = played(self.evaluations[max(self.evaluations)])
        faults = []
        for episodes in self.evaluations.values():
            faults += [episode["fault"] for episode in episodes if episode["fault"] is not None]
        best = self._best()
        return {
            "win_rate_before": win_rate(first),
            "win_rate_after": win_rate(last),
            "best_update": best,
            "win_rate_best": win_rate(played(self.evaluations[best])),
            "return_before": spread(e["return"] for e in first),
            "return_after": spread(e["return"] for e in last),
            "valid_action_ratio_before": _valid_share(first),
            "valid_action_ratio_after": _valid_share(last),
            "turns_per_episode_before": mean(e["turns"] for e in first),
            "turns_per_episode_after": mean(e["turns"] for e in last),
            "verdict": judge(first, last),
            "failed_episodes": len(faults),
            "first_failure": faults[0].strip().splitlines()[0] if faults else None,
        }


def _valid_share(episodes: Sequence[Mapping[str, Any]]) -> float:
    turns = sum(episode["turns"] for episode in episodes)
    valid = sum(episode["valid_action_ratio"] * episode["turns"] for episode in episodes)
    return round(valid / max(turns, 1), 4)
