"""What a study's runs wrote: curves over turns and time, and the numbers that a table shows."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedded.metrics_log import Row, read_rows
from embedded.studies.plan import DONE, ROWS
from embedded.studies.study import Study

MEASURES = {"success": "win rate", "progression": "progression", "return": "return"}
"""Names of what held-out episodes are compared by."""
_TASK_WIN_RATE = re.compile("eval/(.+)/success")


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[Row]
    done: bool
    measure: str = "success"

    def facts(self) -> dict[str, float | None]:
        """The table's columns. Losses and staleness are means over the updates that also trained the actor."""
        results = [row for row in self.rows if self.key in row]
        trained = [row for row in self.rows if row.get("train/actor_trains")]
        mean_of = lambda key: _mean(row[key] for row in trained if key in row)
        sum_of = lambda key: sum(row.get(key, 0.0) for row in self.rows)
        return {
            "before": results[0][self.key] if results else None,
            "after": results[-1][self.key] if len(results) > 1 else None,
            "length": results[-1]["eval/turns"] if len(results) > 1 else None,
            "value_loss": mean_of("critic/value_loss"),
            "explained_variance": mean_of("critic/explained_variance"),
            "turns": self.total("turns") if self.rows else None,
            "staleness": mean_of("turn/staleness"),
            "seconds": self.total("seconds") if self.rows else None,
            "cpu": self.total("cpu") if self.rows else None,
            "trainer_cpu": sum_of("perf/trainer_cpu_s"),
            "engine_cpu": sum_of("perf/engine_cpu_s"),
        }

    @property
    def key(self) -> str:
        """Name of the compared number in the rows."""
        return f"eval/{self.measure}"

    def total(self, over: str) -> float:
        """All turns, seconds or CPU seconds of the run."""
        return _positions(self.rows, over)[-1]

    def mean_result(self, over: str, end: float) -> float | None:
        """Mean of the held-out curve over the first `end` turns or seconds, linear between evaluations."""
        xs, ys = curve(self.rows, self.key, over)
        if len(xs) < 2 or end <= 0:
            return None
        grid = [end * i / 1000 for i in range(1001)]
        return float(np.interp(grid, xs, ys).mean())

    def task_results(self) -> dict[str, float]:
        """The last evaluation's win rate in each held-out task, if there are several."""
        results = [row for row in self.rows if self.key in row]
        last = results[-1] if len(results) > 1 else {}
        return {found[1]: value for key, value in last.items() if (found := _TASK_WIN_RATE.fullmatch(key))}


def read_runs(folder: Path, study: Study) -> list[Run]:
    """All runs in the folder, in the study's order of variants."""
    runs = []
    for variant in study.variants:
        paths = (folder / variant).glob(f"seed_*/{ROWS}")
        for path in sorted(paths, key=lambda path: int(path.parent.name.split("_")[1])):
            seed = int(path.parent.name.split("_")[1])
            done = path.with_name(DONE).exists()
            runs.append(Run(variant, seed, read_rows(path), done, study.measure))
    return runs


def read_csv(path: Path, measure: str = "success") -> list[Run]:
    """The runs in a study's `raw.csv`."""
    rows: dict[tuple[str, int, bool], list[Row]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            run = (line.pop("variant"), int(line.pop("seed")), line.pop("finished") == "True")
            rows.setdefault(run, []).append({key: float(value) for key, value in line.items() if value})
    return [Run(variant, seed, found, done, measure) for (variant, seed, done), found in rows.items()]


def curve(rows: Sequence[Row], key: str, over: str = "turns") -> tuple[list[float], list[float]]:
    """(turns, seconds or CPU seconds so far; values) of one run, with losses smoothed over five updates."""
    found = [(x, row[key]) for x, row in zip(_positions(rows, over), rows, strict=True) if key in row]
    values = [value for _, value in found]
    if not key.startswith("eval/"):
        values = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    return [x for x, _ in found], values


def _positions(rows: Sequence[Row], over: str) -> list[float]:
    """How far the run was at each row: in turns, wall seconds, or CPU seconds of trainer and engine (`cpu`)."""
    if over != "cpu":
        return [row.get(over, 0.0) for row in rows]
    spent = [row.get("perf/trainer_cpu_s", 0.0) + row.get("perf/engine_cpu_s", 0.0) for row in rows]
    return np.cumsum(spent).tolist()


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
