"""A study's table, plot and CSV files, from the rows that its runs wrote."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedded.metrics_log import Row, actor_fault, read_rows
from embedded.studies.study import Study

COLUMNS = (
    ("win rate before", "before", ".3f"),
    ("win rate after", "after", ".3f"),
    ("turns per episode after", "length", ".1f"),
    ("value loss", "value_loss", ".4f"),
    ("explained variance", "explained_variance", ".2f"),
    ("turns played", "turns", ".0f"),
)
COUNTS = ("update", "turns", "seconds")
"""What every row has."""
TIME_COLUMNS = (
    ("win rate before", "before", ".3f"),
    ("win rate after", "after", ".3f"),
    ("mean win rate over equal turns", "mean_by_turns", ".3f"),
    ("mean win rate over equal time", "mean_by_seconds", ".3f"),
    ("staleness", "staleness", ".2f"),
    ("explained variance", "explained_variance", ".2f"),
    ("wall time, s", "seconds", ".0f"),
    ("trainer CPU, s", "trainer_cpu", ".0f"),
    ("engine CPU, s", "engine_cpu", ".0f"),
)
"""For studies with `compares_time`."""
TIME_NOTE = (
    "Times are without evaluations and checkpoints. Mean win rates are over the held-out curve from the first update "
    "to the end of the shortest run in the table, in turns or in wall time."
)


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[Row]
    done: bool

    def facts(self) -> dict[str, float | None]:
        """The table's columns. Losses and staleness are means over the updates that also trained the actor."""
        evals = [row for row in self.rows if "eval/success" in row]
        trained = [row for row in self.rows if row.get("train/actor_trains")]
        mean_of = lambda key: _mean(row[key] for row in trained if key in row)
        sum_of = lambda key: sum(row.get(key, 0.0) for row in self.rows)
        return {
            "before": evals[0]["eval/success"] if evals else None,
            "after": evals[-1]["eval/success"] if len(evals) > 1 else None,
            "length": evals[-1]["eval/turns"] if len(evals) > 1 else None,
            "value_loss": mean_of("critic/value_loss"),
            "explained_variance": mean_of("critic/explained_variance"),
            "turns": self.total("turns") if self.rows else None,
            "staleness": mean_of("turn/staleness"),
            "seconds": self.total("seconds") if self.rows else None,
            "trainer_cpu": sum_of("perf/trainer_cpu_s"),
            "engine_cpu": sum_of("perf/engine_cpu_s"),
        }

    def total(self, over: str) -> float:
        """All turns or seconds of the run."""
        return self.rows[-1].get(over, 0.0)

    def mean_win_rate(self, over: str, end: float) -> float | None:
        """Mean of the held-out curve over the first `end` turns or seconds, linear between evaluations."""
        xs, ys = _curve(self.rows, "eval/success", over)
        if len(xs) < 2 or end <= 0:
            return None
        grid = [end * i / 1000 for i in range(1001)]
        return float(np.interp(grid, xs, ys).mean())


def write_report(folder: Path, study: Study) -> str:
    """Write `table.md`, `runs.csv`, `raw.csv` and `plot.png` into the study's folder, and return the table as text."""
    runs = read_runs(folder, study)
    write_csv(folder / "raw.csv", runs)
    write_summary_csv(folder / "runs.csv", runs)
    text = table(study, runs)
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(folder / "plot.png", study, runs)
    return f"{text}\nwritten to {folder}/: table.md, plot.png, runs.csv, raw.csv"


def read_runs(folder: Path, study: Study) -> list[Run]:
    """All runs in the folder, in the study's order of variants."""
    runs = []
    for variant in study.variants:
        paths = (folder / variant).glob("seed_*/rows.jsonl")
        for path in sorted(paths, key=lambda path: int(path.parent.name.split("_")[1])):
            seed = int(path.parent.name.split("_")[1])
            runs.append(Run(variant, seed, read_rows(path), (path.parent / "done.json").exists()))
    return runs


def faults_of(runs: Sequence[Run]) -> list[str]:
    """A sentence for each finished run whose actor learned nothing."""
    found = [(run, actor_fault(run.rows)) for run in runs if run.done]
    return [f"{run.variant} seed {run.seed}: {fault}" for run, fault in found if fault]


def table(study: Study, runs: Sequence[Run]) -> str:
    """One Markdown row per variant: mean ± standard error over the seeds that are finished."""
    columns = TIME_COLUMNS if study.compares_time else COLUMNS
    finished = [run for run in runs if run.done and run.rows]
    shortest = {over: min((run.total(over) for run in finished), default=0.0) for over in ("turns", "seconds")}
    lines = [f"**{study.question}**", ""]
    lines += ["| variant | seeds | " + " | ".join(title for title, _, _ in columns) + " |"]
    lines += ["|" + "---|" * (len(columns) + 2)]
    for variant in study.variants:
        done = [run for run in finished if run.variant == variant]
        means = [{f"mean_by_{over}": run.mean_win_rate(over, end) for over, end in shortest.items()} for run in done]
        facts = [{**run.facts(), **mean} for run, mean in zip(done, means, strict=True)]
        cells = [_cell([value for f in facts if (value := f[key]) is not None], form) for _, key, form in columns]
        lines.append(f"| {variant} | {len(done)} | " + " | ".join(cells) + " |")
    open_runs = [f"{run.variant} seed {run.seed}" for run in runs if not run.done]
    notes = ["Mean ± standard error over seeds; losses are means over the updates that trained the actor."]
    notes += [TIME_NOTE] if study.compares_time else []
    notes += [study.note]
    notes += [f"Not finished, and not counted: {', '.join(open_runs)}."] if open_runs else []
    notes += [f"Warning, {fault}." for fault in faults_of(runs)]
    return "\n".join([*lines, "", *(note for note in notes if note)]) + "\n"


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every number of every update and evaluation."""
    names = sorted({key for run in runs for row in run.rows for key in row} - set(COUNTS))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", *COUNTS, *names])
        writer.writeheader()
        for run in runs:
            writer.writerows({"variant": run.variant, "seed": run.seed, **row} for row in run.rows)


def write_summary_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write one row per run, with the table's columns."""
    names = list(Run("", 0, [], False).facts())
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *names])
        writer.writeheader()
        writer.writerows({"variant": r.variant, "seed": r.seed, "finished": r.done, **r.facts()} for r in runs)


def plot(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot held-out win rate and value loss over turns: thin lines for seeds, a thick line for their mean.

    A study that compares time gets a third panel with the win rate over wall time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("eval/success", "turns"), ("critic/value_loss", "turns")]
    panels += [("eval/success", "seconds")] if study.compares_time else []
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(7, 3 * len(panels)), constrained_layout=True)
    for number, variant in enumerate(study.variants):
        mine = [run for run in runs if run.variant == variant]
        for axis, (key, over) in zip(axes, panels, strict=True):
            curves = [_curve(run.rows, key, over) for run in mine]
            for xs, values in curves:
                axis.plot(xs, values, color=f"C{number}", alpha=0.25, linewidth=1)
            xs, values = _mean_curve(curves)
            axis.plot(xs, values, color=f"C{number}", label=variant, marker="o" if key == "eval/success" else None)
    for axis, (key, over) in zip(axes, panels, strict=True):
        axis.set(xlabel="turns played" if over == "turns" else "wall time without evaluations, s")
        if key == "eval/success":
            axis.set(ylabel="win rate, held-out seeds", ylim=(0, 1.02))
        else:
            axis.set(ylabel="value loss (mean of 5 updates)", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set(title=textwrap.fill(study.question, 70))
    axes[0].legend(loc="best")
    axes[1].sharex(axes[0])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(rows: Sequence[Row], key: str, over: str = "turns") -> tuple[list[float], list[float]]:
    """(turns or seconds, values) of one run, with losses smoothed over five updates."""
    found = [row for row in rows if key in row]
    values = [row[key] for row in found]
    if not key.startswith("eval/"):
        values = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    return [row.get(over, 0.0) for row in found], values


def _mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Means over seeds, point by point, up to the length of the shortest curve."""
    shortest = min((len(turns) for turns, _ in curves), default=0)
    mean = lambda part: [sum(curve[part][i] for curve in curves) / len(curves) for i in range(shortest)]
    return mean(0), mean(1)


def _cell(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    n, mean = len(values), sum(values) / len(values)
    error = (sum((value - mean) ** 2 for value in values) / (n - 1) / n) ** 0.5 if n > 1 else None
    return f"{mean:{form}}" + (f" ± {error:{form}}" if error is not None else "")


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
