"""What a study's runs wrote: curves over turns and CPU time, and the means and intervals that a
table shows."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from embedded.run.folder import DONE, check_same
from embedded.run.record import Row, read_rows
from embedded.studies.study import RAW, ROWS, VARIANTS, Plan, Study, files_by_seed
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
        """Compute the table's columns. Losses are means over the updates that also trained the
        actor."""
        results = self.results()
        is_compared = len(results) > 1
        return {
            "before": results[0] if results else None,
            "after": results[-1] if is_compared else None,
            "length": self.evaluated[-1]["eval/turns"] if is_compared else None,
            "value_loss": self.trained_mean("critic/value_loss"),
            "explained_variance": self.trained_mean("critic/explained_variance"),
            "turns": self.total("turns"),
            "cpu": self.total("cpu"),
        }

    def trained_mean(self, key: str) -> float | None:
        """Average a number over the updates that trained the actor; None if it was not logged."""
        values = [row[key] for row in self.rows if row.get("train/actor_trains") and key in row]
        return float(np.mean(values)) if values else None

    def late_mean(self, key: str) -> float:
        """Average a metric over the last half of the updates; raises ConfigError without it."""
        values = [row[key] for row in self.rows if key in row]
        if not values:
            raise ConfigError(f"{self.variant}, seed {self.seed}: no update has {key}")
        return float(np.mean(values[len(values) // 2 :]))

    @property
    def key(self) -> str:
        """Name of the number that evaluations are compared by."""
        return f"eval/{self.measure}"

    @property
    def evaluated(self) -> list[Row]:
        """The rows of evaluations."""
        return [row for row in self.rows if self.key in row]

    def results(self) -> list[float]:
        """Return the compared number of every evaluation."""
        return [row[self.key] for row in self.evaluated]

    def total(self, over: str) -> float:
        """Count all turns or CPU seconds of the run."""
        return _positions(self.rows, over)[-1] if self.rows else 0.0

    def mean_result(self, end: float) -> float | None:
        """Average the held-out curve over the first `end` turns, linear between evaluations."""
        xs, ys = curve(self.rows, self.key)
        if len(xs) < 2 or end <= 0:
            return None
        return float(np.interp(np.linspace(0, end, 1001), xs, ys).mean())

    def task_results(self) -> dict[str, float]:
        """Return the last evaluation's win rate in each held-out task, if there are several."""
        last = self.evaluated[-1] if len(self.evaluated) > 1 else {}
        rates = {}
        for key, value in last.items():
            named = re.fullmatch("eval/(.+)/success", key)
            if named:
                rates[named[1]] = value
        return rates if len(rates) > 1 else {}


def read_runs(folder: Path, study: Study) -> list[Run]:
    """Read all runs in the folder, in the study's order of variants; raises ConfigError if a
    finished one lost rows."""
    runs = []
    for variant in study.variants:
        for seed, path in sorted(files_by_seed(folder / variant, ROWS).items()):
            rows = read_rows(path)
            done = path.with_name(DONE)
            if done.exists():
                updates = json.loads(done.read_text())["updates"]
                last = rows[-1] if rows else {"update": 0}
                if last["update"] != updates or "eval/episodes" not in last:
                    ends = f"{path} ends at update {last['update']:g} of {updates}"
                    raise ConfigError(f"{ends}: delete {path.parent} and run it again")
            runs.append(Run(variant, seed, rows, done.exists(), study.measure))
    return runs


def read_csv(path: Path, measure: str = "success") -> list[Run]:
    """Read the runs in a study's `raw.csv`."""
    rows: dict[tuple[str, int, bool], list[Row]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            variant, seed, finished = (line.pop(name) for name in ("variant", "seed", "finished"))
            run = variant, int(seed), finished == "True"
            numbers = {key: float(value) for key, value in line.items() if value}
            rows.setdefault(run, []).append(numbers)
    return [
        Run(variant, seed, found, done, measure) for (variant, seed, done), found in rows.items()
    ]


def finished_elsewhere(plan: Plan) -> list[Run]:
    """Read the finished runs in the study's `raw.csv` that have no folder here, as those of another
    machine.

    Raises ConfigError unless `variants.json` beside it has the same settings.
    """
    path = plan.folder / RAW
    variants = plan.folder / VARIANTS
    found = []
    for run in read_csv(path) if path.exists() else []:
        is_here = plan.run_folder(run.variant, run.seed).exists()
        if run.done and run.variant in plan.study.variants and not is_here:
            found.append(run)
    if not found:
        return []
    if not variants.exists():
        unknown = f"{path} has finished runs, but {variants.name} beside it, which says their settings, is missing"
        raise ConfigError(f"{unknown}; copy it there, too, or delete {path.name} to run them again")
    settings = json.loads(variants.read_text(encoding="utf-8"))
    for variant in {run.variant for run in found}:
        check_same(path, settings.get(variant), plan.settings(variant, 0))
    return found


def curve(rows: Sequence[Row], key: str, over: str = "turns") -> tuple[list[float], list[float]]:
    """(turns or CPU seconds so far; values) of one run, with losses smoothed over five updates."""
    xs = []
    values = []
    for x, row in zip(_positions(rows, over), rows, strict=True):
        if key in row:
            xs.append(x)
            values.append(row[key])
    if not key.startswith("eval/"):
        latest = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        values = [float(np.mean(part)) for part in latest]
    return xs, values


def _positions(rows: Sequence[Row], over: str) -> list[float]:
    """Tell how far the run was at each row: in turns, or CPU seconds of trainer and engine
    (`cpu`)."""
    if over == "turns":
        return [row["turns"] for row in rows]
    seconds = [
        row.get("perf/trainer_cpu_s", 0.0) + row.get("perf/engine_cpu_s", 0.0) for row in rows
    ]
    return np.cumsum(seconds).tolist()


def interquartile_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the interquartile mean and the ends of its 95 % percentile bootstrap interval.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
    (2021). A quarter of the values is left out at each end, rounded down, so this is the mean of up
    to three values, whose interval reaches from the least to the greatest.
    """
    found = np.asarray(values, dtype=float)
    drawn = np.random.RandomState(0).randint(len(found), size=(REPETITIONS, len(found)))
    means = stats.trim_mean(found[drawn], 0.25, axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(stats.trim_mean(found, 0.25)), float(low), float(high)


def markdown(first: str, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; `first` is the heading of the rows' names."""
    head = f"| {first} | {' | '.join(titles)} |"
    rule = "|" + "---|" * (head.count("|") - 1)
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return [head, rule, *lines]


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
    error = f" ± {stats.sem(values):{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{error}"
