"""What a study's runs wrote: curves over turns and time, and the means and intervals that a table shows."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedded.run.folder import DONE
from embedded.run.record import Row, read_rows
from embedded.studies.study import ROWS, Study, files_by_seed
from rollout.play.metrics import mean
from slime_verlog import ConfigError

REPETITIONS = 2000  # bootstrap samples per interval


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[Row]
    done: bool
    measure: str = "success"

    def columns(self) -> dict[str, float | None]:
        """Compute the table's columns. Losses and staleness are means over the updates that also trained the actor."""
        results = [row for row in self.rows if self.key in row]
        trained = [row for row in self.rows if row.get("train/actor_trains")]
        mean_of = lambda key: mean(found) if (found := [row[key] for row in trained if key in row]) else None
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
        """Count all turns, seconds or CPU seconds of the run."""
        return _positions(self.rows, over)[-1]

    def mean_result(self, over: str, end: float) -> float | None:
        """Average the held-out curve over the first `end` turns or seconds, linear between evaluations."""
        xs, ys = curve(self.rows, self.key, over)
        if len(xs) < 2 or end <= 0:
            return None
        return float(np.interp([end * i / 1000 for i in range(1001)], xs, ys).mean())

    def task_results(self) -> dict[str, float]:
        """Return the last evaluation's win rate in each held-out task, if there are several."""
        results = [row for row in self.rows if self.key in row]
        last = results[-1] if len(results) > 1 else {}
        return {found[1]: value for key, value in last.items() if (found := re.fullmatch("eval/(.+)/success", key))}


def read_runs(folder: Path, study: Study) -> list[Run]:
    """Read all runs in the folder, in the study's order of variants; raises ConfigError if a finished one lost rows."""
    runs = []
    for variant in study.variants:
        for seed, path in sorted(files_by_seed(folder / variant, ROWS).items()):
            rows, done = read_rows(path), path.with_name(DONE)
            if is_done := done.exists():
                updates, last = json.loads(done.read_text())["updates"], (rows or [{"update": 0}])[-1]
                if last["update"] != updates or "eval/episodes" not in last:
                    ends = f"{path} ends at update {last['update']:g} of {updates}"
                    raise ConfigError(f"{ends}: delete {path.parent} and run it again")
            runs.append(Run(variant, seed, rows, is_done, study.measure))
    return runs


def read_csv(path: Path, measure: str = "success") -> list[Run]:
    """Read the runs in a study's `raw.csv`."""
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
    """Tell how far the run was at each row: in turns, wall seconds, or CPU seconds of trainer and engine (`cpu`)."""
    if over != "cpu":
        return [row.get(over, 0.0) for row in rows]
    return np.cumsum([row.get("perf/trainer_cpu_s", 0.0) + row.get("perf/engine_cpu_s", 0.0) for row in rows]).tolist()


def interquartile_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the interquartile mean and the ends of its 95 % percentile bootstrap interval.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021). A quarter of
    the values is left out at each end, rounded down, so this is the mean of up to three values, whose interval reaches
    from the least to the greatest.
    """
    found, cut = np.asarray(values, dtype=float), len(values) // 4
    draws = found[np.random.RandomState(0).randint(len(found), size=(REPETITIONS, len(found)))]
    means = [np.sort(x)[..., cut : len(found) - cut].mean(-1) for x in (found, draws)]
    low, high = np.percentile(means[1], [2.5, 97.5])
    return float(means[0]), float(low), float(high)


def markdown(first: str, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; `first` is the heading of the rows' names."""
    head = f"| {first} | {' | '.join(titles)} |"
    return [head, "|" + "---|" * (head.count("|") - 1), *(f"| {name} | {' | '.join(rows[name])} |" for name in rows)]


def iqm_cell(values: Sequence[float], form: str) -> str:
    """Return a table's cell: interquartile mean and interval."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "-"
    mean, low, high = interquartile_mean(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def mean_cell(values: Sequence[float], form: str) -> str:
    """Return a table's cell: mean ± standard error."""
    if not values:
        return "-"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{error}"
