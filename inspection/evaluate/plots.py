"""Draws the results of a sweep with their standard errors."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from inspection.evaluate.table import COLUMNS, Row, Table
from rollout.errors import MissingDependencyError

SHOWN = ("success", "return")


def plot_sweep(table: Table, path: Path) -> None:
    """Win rate and return against the first swept key; one line per task and value of the other keys.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("matplotlib is missing; install it with: pip install matplotlib") from error
    swept = next(iter(table.rows[0].point.values))
    places = list(dict.fromkeys(str(row.point.values[swept]) for row in table.rows))
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        others = [f"{key}={value}" for key, value in row.point.values.items() if key != swept]
        lines[", ".join([row.task, *others])].append(row)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
        for label, rows in lines.items():
            shown = [row for row in rows if row.cells[column].mean is not None]
            axes.errorbar(
                [places.index(str(row.point.values[swept])) for row in shown],
                [row.cells[column].mean for row in shown],
                yerr=[row.cells[column].se or 0.0 for row in shown],
                marker="o",
                capsize=3,
                label=label,
            )
        axes.set_xticks(range(len(places)), places)
        axes.set(xlabel=swept, ylabel=COLUMNS[column])
        axes.grid(alpha=0.3)
    if len(lines) > 1:
        figure.axes[0].legend(fontsize="small")
    figure.suptitle(f"{table.player}: mean ± standard error", fontsize="medium")
    figure.savefig(path, dpi=150)
