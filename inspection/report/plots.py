"""Draws one plot per question, and one over updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inspection.report.columns import Column, Series, return_deviation
from inspection.report.output import clean

_MAX_COLUMNS = _MAX_BARS = 12
_GOAL = {"color": "tab:green", "linestyle": "--", "linewidth": 1}


def draw_plots(folder: Path, columns: Sequence[Column], series: Sequence[Series]) -> list[str]:
    """Write the PNG files and return their names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawings = {"diversity": _diversity, "reasoning": _reasoning, "validity": _validity, "failures": _failures}
    figures = {}
    for name, draw in drawings.items():
        figures[name], axes = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        draw(axes, columns[:_MAX_COLUMNS])
    if series:
        figures["updates"], axes = pyplot.subplots(1, 4, figsize=(14, 3.2), constrained_layout=True)
        _over_updates(axes, series)
    for name, figure in figures.items():
        figure.savefig(folder / f"report_{name}.png", dpi=110)
        pyplot.close(figure)
    return [f"report_{name}.png" for name in figures]


def _diversity(axes: Any, columns: Sequence[Column]) -> None:
    total = sum((column.counts.actions for column in columns), Counter())
    used = [action for action, _ in total.most_common(_MAX_BARS)]
    shares = [[c.counts.actions[action] / max(c.counts.actions.total(), 1) for action in used] for c in columns]
    _bars(axes[0], columns, shares, [_plain(action, 18) for action in used])
    axes[0].set(title="actions", ylabel="share of valid answers")
    keys = ("distinct_reasoning", "reasoning_overlap", "observation_retrieval", "state_information")
    names = ["distinct\n(high is good)", "overlap\n(low)", "points to its\nobservation (high)"]
    _bars(axes[1], columns, _values(columns, keys), [*names, "action from\nobservation (high)"])
    axes[1].set(title="reasoning and observation", ylim=(0, 1.02))
    axes[1].legend(fontsize=7)


def _reasoning(axes: Any, columns: Sequence[Column]) -> None:
    longest = max((column.values["reasoning_words_p95"].number or 0 for column in columns), default=0)
    bins = [longest * 1.3 * k / 30 for k in range(31)] if longest else 10
    for column in columns:
        if len(column.counts.words):
            clipped = [min(words, longest * 1.29) for words in column.counts.words]
            weights = [1 / len(clipped)] * len(clipped)
            axes[0].hist(clipped, bins=bins, weights=weights, histtype="step", label=_label(column))
    axes[0].set(title="words of reasoning", xlabel="words", ylabel="share of answers")
    if axes[0].get_legend_handles_labels()[1]:
        axes[0].legend(fontsize=7)
    keys = ("answers_with_reasoning", "text_after_action", "cut_answers")
    names = ["with reasoning\n(high is good)", "text after\nthe action (low)", "cut by\nlength (low)"]
    _bars(axes[1], columns, _values(columns, keys), names)
    axes[1].set(title="form of the answers", ylim=(0, 1.02))


def _validity(axes: Any, columns: Sequence[Column]) -> None:
    valid = [column.values["valid_actions"].number or 0.0 for column in columns]
    causes = [Counter(column.rejections.causes) for column in columns]
    axes[0].bar(range(len(columns)), valid, color="0.8", label="valid")
    _stack(axes[0], columns, causes, [column.counts.turns for column in columns], valid)
    axes[0].axhline(0.95, **_GOAL)
    lowest = min(valid, default=0)
    axes[0].set(title="answers by cause; dashed: the goal of 95 %", ylim=(max(lowest - 0.1, 0), 1.0))
    axes[0].legend(fontsize=7)
    for column in columns:
        shares = [(k, valid / answers) for k, (valid, answers) in enumerate(column.counts.thirds) if answers]
        axes[1].plot([k for k, _ in shares], [y for _, y in shares], "o-", label=_label(column))
    axes[1].axhline(0.95, **_GOAL)
    _ticks(axes[1], ["first third", "second", "last third"])
    axes[1].set(title="valid answers within an episode")
    axes[1].legend(fontsize=7)


def _failures(axes: Any, columns: Sequence[Column]) -> None:
    ends = [
        Counter("success" if e.success else _plain(e.stop, 20) for e in column.counts.episodes) for column in columns
    ]
    _stack(axes[0], columns, ends, [counts.total() for counts in ends], [0.0] * len(columns))
    axes[0].set(title="how episodes end", ylabel="share of episodes", ylim=(0, 1.0))
    axes[0].legend(fontsize=7)
    turns = [[episode.turns for episode in column.counts.episodes] for column in columns]
    axes[1].hist(turns, bins=20, label=[_label(column) for column in columns])
    axes[1].set(title="turns per episode", xlabel="turns", ylabel="episodes")
    axes[1].legend(fontsize=7)


def _over_updates(axes: Any, series: Sequence[Series]) -> None:
    curves = {
        "valid answers": lambda column: column.values["valid_actions"].number,
        "words of reasoning, median": lambda column: column.values["reasoning_words"].number,
        "standard deviation of returns": return_deviation,
        "effective actions": lambda column: column.values["effective_actions"].number,
    }
    for axis, (title, read) in zip(axes, curves.items(), strict=True):
        for one in series:
            found = [(x, y) for x, y in zip(one.updates, map(read, one.columns), strict=True) if y is not None]
            axis.plot([x for x, _ in found], [y for _, y in found], "o-", label=_plain(one.name, 24))
        axis.set(title=title, xlabel="updates")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)


def _values(columns: Sequence[Column], keys: Sequence[str]) -> list[list[float]]:
    return [[column.values[key].number or 0.0 for key in keys] for column in columns]


def _bars(axis: Any, columns: Sequence[Column], heights: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Grouped bars: one group per name, with one bar per column."""
    width = 0.8 / len(columns)
    for number, (column, row) in enumerate(zip(columns, heights, strict=True)):
        places = [k + (number - (len(columns) - 1) / 2) * width for k in range(len(row))]
        axis.bar(places, row, width, label=_label(column))
    _ticks(axis, names)


def _stack(
    axis: Any, columns: Sequence[Column], counts: Sequence[Mapping[str, int]], totals: Sequence[int], base: list[float]
) -> None:
    """Stacked bars: one bar per column on its `base`, with the share of each name, the most frequent first."""
    for name, _ in sum(map(Counter, counts), Counter()).most_common():
        shares = [one.get(name, 0) / max(total, 1) for one, total in zip(counts, totals, strict=True)]
        color = "tab:green" if name == "success" else None
        axis.bar(range(len(columns)), shares, bottom=base, label=name, color=color)
        base = [a + b for a, b in zip(base, shares, strict=True)]
    _ticks(axis, [_label(column) for column in columns])


def _ticks(axis: Any, labels: Sequence[str]) -> None:
    slanted = any(len(line) > 12 for label in labels for line in label.split("\n")) and len(labels) > 4
    rotation, align = (30, "right") if slanted else (0, "center")
    axis.set_xticks(range(len(labels)), labels, fontsize=8, rotation=rotation, ha=align)


def _label(column: Column) -> str:
    return _plain(column.label, 24)


def _plain(text: str, most: int) -> str:
    """Without the marks that matplotlib reads as mathematics or as a hidden label."""
    return clean(text, most).replace("$", "S").lstrip("_") or "-"
