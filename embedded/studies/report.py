"""A study's table, plots and CSV files, from the rows that its runs wrote."""

import csv
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedded.run.ending import MEASURES
from embedded.run.folder import write_text
from embedded.run.record import actor_fault
from embedded.studies.contrasts import area_lines, areas, contrast_lines, interval
from embedded.studies.results import Run, curve, iqm_cell, markdown, mean_cell, read_runs
from embedded.studies.study import Study

SHARED = (
    ("{measure} before", "before", ".3f"),
    ("{measure} after", "after", ".3f"),
    ("mean {measure} over equal turns", "mean_by_turns", ".3f"),
)
COLUMNS = (
    *SHARED,
    ("turns per episode after", "length", ".1f"),
    ("value loss", "value_loss", ".4f"),
    ("explained variance", "explained_variance", ".2f"),
    ("turns played", "turns", ".0f"),
    ("CPU, s", "cpu", ".0f"),
)
TIME_COLUMNS = (
    *SHARED,
    ("mean {measure} over equal time", "mean_by_seconds", ".3f"),
    ("staleness", "staleness", ".2f"),
    ("explained variance", "explained_variance", ".2f"),
    ("wall time, s", "seconds", ".0f"),
    ("trainer CPU, s", "trainer_cpu", ".0f"),
    ("engine CPU, s", "engine_cpu", ".0f"),
)
"""For studies with `compares_time`."""
AGGREGATED = ("after", "mean_by_turns", "mean_by_seconds")
"""Columns with interquartile means and bootstrap intervals. The others have means and standard errors."""
NOTE = (
    "Held-out results after training are interquartile means over seeds, with 95 % bootstrap intervals; with two or "
    "three seeds, that is the plain mean with the least and the greatest seed. Other columns are means ± standard "
    "errors. Losses are means over the updates that trained the actor. Means over equal turns or time are of the "
    "held-out curve, from the first update to the end of the shortest run in the table. Time is without evaluations "
    "and checkpoints."
)
AXES = {
    "turns": "turns played",
    "seconds": "wall time without evaluations, s",
    "cpu": "CPU time of trainer and engine, without evaluations, s",
}
COUNTS = ("update", "turns", "seconds")  # what every row has


def write_report(folder: Path, study: Study) -> str:
    """Write `table.md`, `runs.csv`, `raw.csv` and `plot.png` into the study's folder, and return the table as text."""
    runs = read_runs(folder, study)
    write_csv(folder / "raw.csv", runs)
    _write(folder / "runs.csv", list(Run("", 0, [], False).columns()), [(run, run.columns()) for run in runs])
    text = table(study, runs)
    write_text(folder / "table.md", text)
    plot(folder / "plot.png", study, runs)
    return f"{text}\nwritten to {folder}/: table.md, plot.png, runs.csv, raw.csv"


def faults_of(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each finished run whose actor learned nothing."""
    found = [(run, actor_fault(run.rows)) for run in runs if run.done]
    return [f"{run.variant} seed {run.seed}: {fault}" for run, fault in found if fault]


def table(study: Study, runs: Sequence[Run]) -> str:
    """Return the study's tables with its question and notes; runs that are not finished are named and not counted."""
    open_runs = [f"{run.variant} seed {run.seed}" for run in runs if not run.done]
    notes = [NOTE, study.note]
    notes += [f"Not finished, and not counted: {', '.join(open_runs)}."] if open_runs else []
    notes += [f"Warning, {fault}." for fault in faults_of(runs)]
    lines = [f"**{study.question}**", "", *table_lines(study, [run for run in runs if run.done])]
    lines += ["", *contrast_lines(study, runs), "", *area_lines(study, runs)] if study.contrasts else []
    return "\n".join([*lines, "", *(note for note in notes if note)]) + "\n"


def table_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return one Markdown row per variant, and a second table if there are several held-out tasks."""
    columns = TIME_COLUMNS if study.compares_time else COLUMNS
    runs = [run for run in runs if run.rows]
    shortest = {over: min((run.total(over) for run in runs), default=0.0) for over in ("turns", "seconds")}
    rows = {}
    for variant in study.variants:
        mine = [run for run in runs if run.variant == variant]
        means = [{f"mean_by_{over}": run.mean_result(over, end) for over, end in shortest.items()} for run in mine]
        found = [{**run.columns(), **mean} for run, mean in zip(mine, means, strict=True)]
        rows[f"{variant} | {len(mine)}"] = [_cell(found, key, form) for _, key, form in columns]
    titles = [title.format(measure=MEASURES[study.measure]) for title, _, _ in columns]
    lines = markdown("variant | seeds", titles, rows)
    tasks = sorted({task for run in runs for task in run.task_results()})
    if tasks:
        by_task = {}
        for variant in study.variants:
            results = [run.task_results() for run in runs if run.variant == variant]
            by_task[variant] = [iqm_cell([found[task] for found in results if task in found], ".3f") for task in tasks]
        lines += ["", *markdown("win rate after, by held-out task", tasks, by_task)]
    return lines


def _cell(found: Sequence[Mapping[str, float | None]], key: str, form: str) -> str:
    values = [value for row in found if (value := row[key]) is not None]
    return iqm_cell(values, form) if key in AGGREGATED else mean_cell(values, form)


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every number of every update and evaluation, with six digits."""
    names = sorted({key for run in runs for row in run.rows for key in row} - set(COUNTS))
    short = ((run, {key: f"{value:.6g}" for key, value in row.items()}) for run in runs for row in run.rows)
    _write(path, [*COUNTS, *names], short)


def _write(path: Path, names: Sequence[str], rows: Iterable[tuple[Run, Mapping[str, object]]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *names])
        writer.writeheader()
        writer.writerows({"variant": r.variant, "seed": r.seed, "finished": r.done, **row} for r, row in rows)


def plot(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot the held-out result over turns and time, and the value loss: thin lines for seeds, a thick one for the mean.

    Time is wall time in a study that compares it, and otherwise CPU time, which a busy machine does not change.
    """
    from matplotlib.figure import Figure

    result = f"eval/{study.measure}"
    panels = [(result, "turns"), ("critic/value_loss", "turns"), (result, "seconds" if study.compares_time else "cpu")]
    figure = Figure(figsize=(7, 9), layout="constrained")
    axes = figure.subplots(len(panels), 1)
    for number, variant in enumerate(study.variants):
        mine = [run for run in runs if run.variant == variant]
        for axis, (key, over) in zip(axes, panels, strict=True):
            _draw(axis, [curve(run.rows, key, over) for run in mine], f"C{number}", variant, key == result)
    for axis, (key, over) in zip(axes, panels, strict=True):
        axis.set(xlabel=AXES[over])
        if key == result:
            axis.set(ylabel=f"{MEASURES[study.measure]}, held-out seeds")
        else:
            axis.set(ylabel="value loss (mean of 5 updates)", yscale="log")
        if key == "eval/success":
            axis.set(ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set(title=textwrap.fill(study.question, 70))
    # Below the panels, where it hides no curve.
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    axes[1].sharex(axes[0])
    figure.savefig(path, dpi=120)


def plot_by_length(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot areas over the length with their 90 % intervals, then held-out scores over turns, one panel per length.

    The length is the last part of a variant's name (`dual_400`). Lengths without a run are left out, methods with one
    length have no area, and fewer than four seeds no interval. Thin lines are seeds, thick ones their mean. A score is
    0 for random play and 1 for the expert.
    """
    from matplotlib.figure import Figure

    found = {variant: list(by_seed.values()) for variant, by_seed in areas(study, runs).items() if by_seed}
    names = [variant.rpartition("_") for variant in found or study.variants]
    methods, _, lengths = (list(dict.fromkeys(parts)) for parts in zip(*names, strict=True))
    lengths = sorted(lengths, key=int)
    figure = Figure(figsize=(4 * len(lengths) + 4, 4.5), layout="constrained")
    over_length, *axes = figure.subplots(1, len(lengths) + 1, sharey=True)
    for number, method in enumerate(methods):
        mine = {length: found[f"{method}_{length}"] for length in lengths if f"{method}_{length}" in found}
        if len(mine) > 1:
            means = list(map(np.mean, mine.values()))
            reach = [interval(values)[1] - np.mean(values) if len(values) > 3 else 0 for values in mine.values()]
            over_length.errorbar(list(mine), means, reach, color=f"C{number}", marker="o", capsize=3)
        for axis, length in zip(axes, lengths, strict=True):
            curves = [curve(r.rows, f"eval/{study.measure}") for r in runs if r.variant == f"{method}_{length}"]
            scores = [(turns, list(map(study.score, values))) for turns, values in curves]
            _draw(axis, scores, f"C{number}", method.replace("_", " "), False)
    over_length.set(title="mean score of the whole run", xlabel="turns per episode", ylabel="score, held-out episodes")
    for axis, length in zip(axes, lengths, strict=True):
        axis.set(title=f"{length} turns per episode", xlabel="turns played")
    for axis in (over_length, *axes):
        axis.grid(alpha=0.3)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(methods), 8), frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, curves: Sequence[tuple[list[float], list[float]]], color: str, label: str, marked: bool) -> None:
    for xs, values in curves:
        axis.plot(xs, values, color=color, alpha=0.25, linewidth=1)
    # The mean goes up to the length of the shortest curve.
    shortest = min((len(xs) for xs, _ in curves), default=0)
    means = np.mean([[xs[:shortest], values[:shortest]] for xs, values in curves], axis=0) if curves else [[], []]
    axis.plot(*means, color=color, label=label, marker="o" if marked else None)
