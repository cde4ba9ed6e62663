"""A study's table, plots and CSV files, from the rows that its runs wrote."""

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedded.run.ending import MEASURES
from embedded.run.folder import write_text
from embedded.run.record import actor_fault
from embedded.studies.contrasts import area_lines, areas, contrast_lines, interval
from embedded.studies.results import Run, curve, iqm_cell, markdown, mean_cell, read_runs
from embedded.studies.study import RAW, Study, panels

COLUMNS = {
    "before": ("{measure} before", mean_cell, ".3f"),
    "after": ("{measure} after", iqm_cell, ".3f"),
    "mean_by_turns": ("mean {measure} over equal turns", iqm_cell, ".3f"),
    "length": ("turns per episode after", mean_cell, ".1f"),
    "value_loss": ("value loss", mean_cell, ".4f"),
    "explained_variance": ("explained variance", mean_cell, ".2f"),
    "turns": ("turns played", mean_cell, ".0f"),
    "cpu": ("CPU, s", mean_cell, ".0f"),
}
"""Title, kind of cell and format."""
NOTE = (
    "Held-out results after training are interquartile means over seeds, with 95 % bootstrap "
    "intervals; with two or three seeds, that is the plain mean with the least and the greatest "
    "seed. Other columns are means ± standard errors. Losses are means over the updates that "
    "trained the actor. Means over equal turns are of the held-out curve, from the first update "
    "to the end of the shortest run in the table. CPU time is without evaluations and checkpoints."
)
AXES = {"turns": "turns played", "cpu": "CPU time of trainer and engine, without evaluations, s"}
COUNTS = ("update", "turns", "seconds")  # what every row has


def write_report(folder: Path, study: Study) -> str:
    """Write `table.md`, `raw.csv` and `plot.png` into the study's folder, and return the table as
    text."""
    runs = read_runs(folder, study)
    write_csv(folder / RAW, runs)
    text = table(study, runs)
    write_text(folder / "table.md", text)
    plot(folder / "plot.png", study, runs)
    return f"{text}\nwritten to {folder}/: table.md, plot.png, raw.csv"


def faults_of(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each finished run whose actor learned nothing."""
    sentences = []
    for run in runs:
        fault = actor_fault(run.rows) if run.done else None
        if fault:
            sentences.append(f"{run.variant} seed {run.seed}: {fault}")
    return sentences


def table(study: Study, runs: Sequence[Run]) -> str:
    """Return the study's tables with its question and notes; runs that are not finished are named
    and not counted."""
    finished = [run for run in runs if run.done]
    unfinished = [f"{run.variant} seed {run.seed}" for run in runs if not run.done]
    notes = [NOTE, study.note, _panel_note(study)]
    if unfinished:
        notes.append(f"Not finished, and not counted: {', '.join(unfinished)}.")
    notes += [f"Warning, {fault}." for fault in faults_of(runs)]
    lines = [f"**{study.question}**", "", *table_lines(study, finished)]
    if study.contrasts:
        lines += ["", *contrast_lines(study, runs), "", *area_lines(study, runs)]
    return "\n".join([*lines, "", *filter(None, notes)]) + "\n"


def _panel_note(study: Study) -> str:
    found = panels(study)
    if len(found) == 1:
        return f"Held-out panel: {', '.join(found)}."
    by_panel = [f"{panel} ({', '.join(variants)})" for panel, variants in found.items()]
    return f"The variants have different held-out panels: {'; '.join(by_panel)}."


def table_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return one Markdown row per variant, and a second table if there are several held-out
    tasks."""
    runs = [run for run in runs if run.rows]
    end = min((run.total("turns") for run in runs), default=0.0)
    rows = {}
    by_task = {}
    tasks = sorted({task for run in runs for task in run.task_results()})
    for variant in study.variants:
        mine = [run for run in runs if run.variant == variant]
        columns_of_each = [{**run.columns(), "mean_by_turns": run.mean_result(end)} for run in mine]
        cells = []
        for key, (_, cell, form) in COLUMNS.items():
            values = [columns[key] for columns in columns_of_each]
            cells.append(cell([value for value in values if value is not None], form))
        rows[f"{variant} | {len(mine)}"] = cells
        by_task[variant] = []
        for task in tasks:
            rates = [run.task_results()[task] for run in mine if task in run.task_results()]
            by_task[variant].append(iqm_cell(rates, ".3f"))
    titles = [title.format(measure=MEASURES[study.measure]) for title, _, _ in COLUMNS.values()]
    lines = markdown("variant | seeds", titles, rows)
    if tasks:
        lines += ["", *markdown("win rate after, by held-out task", tasks, by_task)]
    return lines


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every number of every update and evaluation, with six digits."""
    names: set[str] = set()
    for run in runs:
        names.update(*run.rows)
    names -= {*COUNTS}
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *COUNTS, *sorted(names)])
        writer.writeheader()
        for run in runs:
            about = {"variant": run.variant, "seed": run.seed, "finished": run.done}
            for row in run.rows:
                numbers = {key: f"{value:.6g}" for key, value in row.items()}
                writer.writerow({**about, **numbers})


def plot(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot the held-out result over turns and CPU time, and the value loss: thin lines are seeds,
    thick ones means.

    A busy machine does not change CPU time.
    """
    from matplotlib.figure import Figure

    result = f"eval/{study.measure}"
    panels = [(result, "turns"), ("critic/value_loss", "turns"), (result, "cpu")]
    figure = Figure(figsize=(7, 9), layout="constrained")
    axes = figure.subplots(len(panels), 1)
    for axis, (key, over) in zip(axes, panels, strict=True):
        is_result = key == result
        for number, variant in enumerate(study.variants):
            curves = [curve(run.rows, key, over) for run in runs if run.variant == variant]
            _draw(axis, curves, f"C{number}", variant, is_result)
        axis.set(xlabel=AXES[over])
        axis.grid(alpha=0.3)
        if is_result:
            axis.set(ylabel=f"{MEASURES[study.measure]}, held-out seeds")
        else:
            axis.set(ylabel="value loss (mean of 5 updates)", yscale="log")
        if key == "eval/success":
            axis.set(ylim=(0, 1.02))
    axes[0].set(title=textwrap.fill(study.question, 70))
    axes[1].sharex(axes[0])
    _save(figure, path, axes[0], columns=3)


def _save(figure: Any, path: Path, axis: Any, columns: int) -> None:
    """Save the figure with the axis's legend below the panels, where it hides no curve."""
    lines, labels = axis.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=120)


def plot_by_length(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot areas over the length with their 90 % intervals, then held-out scores over turns, one
    panel per length.

    The length is the last part of a variant's name (`dual_400`). Lengths without a run are left
    out, methods with one length have no area, and fewer than four seeds no interval. Thin lines are
    seeds, thick ones their mean. A score is 0 for random play and 1 for the expert.
    """
    from matplotlib.figure import Figure

    by_seed = areas(study, runs)
    found = {variant: list(own.values()) for variant, own in by_seed.items() if own}
    names = [variant.rpartition("_") for variant in found or study.variants]
    methods = list(dict.fromkeys(method for method, _, _ in names))
    lengths = sorted({length for _, _, length in names}, key=int)
    figure = Figure(figsize=(4 * len(lengths) + 4, 4.5), layout="constrained")
    over_length, *axes = figure.subplots(1, len(lengths) + 1, sharey=True)
    for number, method in enumerate(methods):
        color = f"C{number}"
        mine = {
            length: found[f"{method}_{length}"]
            for length in lengths
            if f"{method}_{length}" in found
        }
        if len(mine) > 1:
            means = []
            reaches = []
            for values in mine.values():
                mean = float(np.mean(values))
                means.append(mean)
                reaches.append(interval(values)[1] - mean if len(values) > 3 else 0.0)
            over_length.errorbar(list(mine), means, reaches, color=color, marker="o", capsize=3)
        for axis, length in zip(axes, lengths, strict=True):
            scores = []
            for run in runs:
                if run.variant == f"{method}_{length}":
                    turns, values = curve(run.rows, run.key)
                    scores.append((turns, [study.score(value) for value in values]))
            _draw(axis, scores, color, method.replace("_", " "), False)
    over_length.set(
        title="mean score of the whole run",
        xlabel="turns per episode",
        ylabel="score, held-out episodes",
    )
    for axis, length in zip(axes, lengths, strict=True):
        axis.set(title=f"{length} turns per episode", xlabel="turns played")
    for axis in (over_length, *axes):
        axis.grid(alpha=0.3)
    _save(figure, path, axes[0], columns=min(len(methods), 8))


def _draw(
    axis: Any,
    curves: Sequence[tuple[list[float], list[float]]],
    color: str,
    label: str,
    marked: bool,
) -> None:
    for xs, values in curves:
        axis.plot(xs, values, color=color, alpha=0.25, linewidth=1)
    # The mean goes up to the length of the shortest curve.
    shortest = min((len(xs) for xs, _ in curves), default=0)
    cut = [(xs[:shortest], values[:shortest]) for xs, values in curves]
    means = np.mean(cut, axis=0) if cut else ([], [])
    marker = "o" if marked else None
    axis.plot(*means, color=color, label=label, marker=marker)
