"""The plot of a study."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedded.studies.results import MEASURES, Run, curve
from embedded.studies.study import Study

AXES = {
    "turns": "turns played",
    "seconds": "wall time without evaluations, s",
    "cpu": "CPU time of trainer and engine, without evaluations, s",
}


def plot(path: Path, study: Study, runs: Sequence[Run]) -> None:
    """Plot the held-out result over turns and time, and the value loss: thin lines for seeds, a thick one for the mean.

    Time is wall time in a study that compares it, and otherwise CPU time, which other work on the machine does not
    change.
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
    """Plot held-out scores over turns, one panel per length, which is the last part of a variant's name (`dual_400`).

    Thin lines are seeds, thick ones their mean. A score is 0 for random play and 1 for the expert.
    """
    from matplotlib.figure import Figure

    names = [variant.rpartition("_") for variant in study.variants]
    methods, lengths = (list(dict.fromkeys(parts)) for parts in zip(*((m, n) for m, _, n in names), strict=True))
    figure = Figure(figsize=(4 * len(lengths), 4), layout="constrained")
    axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], sorted(lengths, key=int), strict=True):
        for number, method in enumerate(methods):
            mine = [run for run in runs if run.variant == f"{method}_{length}"]
            curves = [curve(run.rows, f"eval/{study.measure}") for run in mine]
            scores = [(turns, list(map(study.score, values))) for turns, values in curves]
            if scores:
                _draw(axis, scores, f"C{number}", method.replace("_", " "), False)
        axis.set(title=f"{length} turns per episode", xlabel="turns played", ylim=(-0.05, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="score, held-out episodes")
    handles = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(methods), frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, curves: Sequence[tuple[list[float], list[float]]], color: str, label: str, marked: bool) -> None:
    for xs, values in curves:
        axis.plot(xs, values, color=color, alpha=0.25, linewidth=1)
    xs, values = _mean_curve(curves)
    axis.plot(xs, values, color=color, label=label, marker="o" if marked else None)


def _mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Means over seeds, point by point, up to the length of the shortest curve."""
    shortest = min((len(turns) for turns, _ in curves), default=0)
    mean = lambda part: [sum(curve[part][i] for curve in curves) / len(curves) for i in range(shortest)]
    return mean(0), mean(1)
