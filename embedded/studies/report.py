"""A study's table, plot and CSV files, from the rows that its runs wrote."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[Row]
    done: bool

    def facts(self) -> dict[str, float | None]:
        """The table's columns. Losses are means over the updates that also trained the actor."""
        evals = [row for row in self.rows if "eval/success" in row]
        trained = [row for row in self.rows if row.get("train/actor_trains")]
        return {
            "before": evals[0]["eval/success"] if evals else None,
            "after": evals[-1]["eval/success"] if len(evals) > 1 else None,
            "length": evals[-1]["eval/turns"] if len(evals) > 1 else None,
            "value_loss": _mean(row["critic/value_loss"] for row in trained if "critic/value_loss" in row),
            "explained_variance": _mean(
                row["critic/explained_variance"] for row in trained if "critic/explained_variance" in row
            ),
            "turns": self.rows[-1]["turns"] if self.rows else None,
        }


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
    lines = [f"**{study.question}**", ""]
    lines += ["| variant | seeds | " + " | ".join(title for title, _, _ in COLUMNS) + " |"]
    lines += ["|" + "---|" * (len(COLUMNS) + 2)]
    for variant in study.variants:
        done = [run for run in runs if run.variant == variant and run.done]
        facts = [run.facts() for run in done]
        cells = [_cell([value for f in facts if (value := f[key]) is not None], form) for _, key, form in COLUMNS]
        lines.append(f"| {variant} | {len(done)} | " + " | ".join(cells) + " |")
    open_runs = [f"{run.variant} seed {run.seed}" for run in runs if not run.done]
    notes = ["Mean ± standard error over seeds; losses are means over the updates that trained the actor.", study.note]
    notes += [f"Not finished, and not counted: {', '.join(open_runs)}."] if open_runs else []
    notes += [f"Warning, {fault}." for fault in faults_of(runs)]
    return "\n".join([*lines, "", *(note for note in notes if note)]) + "\n"


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every number of every update and evaluation."""
    names = sorted({key for run in runs for row in run.rows for key in row} - {"update", "turns"})
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "update", "turns", *names])
        writer.writeheader()
        for run in runs:
            writer.writerows({"variant": run.variant, "seed": run.seed, **row} for row in run.rows)


def write_summary_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write one row per run, with the table's columns."""
    names = [key for _, key, _ in COLUMNS]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *names])
        writer.writeheader()
        writer.writerows({"variant": r.variant, "seed": r.seed, "finished": r.done, **r.facts()} for r in runs)


def plot(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot held-out win rate and value loss over turns: thin lines for seeds, a thick line for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, constrained_layout=True)
    for number, variant in enumerate(study.variants):
        mine = [run for run in runs if run.variant == variant]
        for axis, key in zip(axes, ("eval/success", "critic/value_loss"), strict=True):
            curves = [_curve(run.rows, key) for run in mine]
            for turns, values in curves:
                axis.plot(turns, values, color=f"C{number}", alpha=0.25, linewidth=1)
            turns, values = _mean_curve(curves)
            axis.plot(turns, values, color=f"C{number}", label=variant, marker="o" if axis is axes[0] else None)
    axes[0].set(ylabel="win rate, held-out seeds", ylim=(0, 1.02), title=textwrap.fill(study.question, 70))
    axes[0].legend(loc="best")
    axes[1].set(xlabel="turns played", ylabel="value loss (mean of 5 updates)", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(turns, values) of one run, with losses smoothed over five updates."""
    found = [row for row in rows if key in row]
    values = [row[key] for row in found]
    if not key.startswith("eval/"):
        values = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    return [row["turns"] for row in found], values


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
