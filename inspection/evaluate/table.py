"""The table of a run: mean ± standard error per setting and task, as text, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspection.evaluate.sweep import Key, SweepPoint
from inspection.text import align
from rollout.spec import DEFAULT_MAX_TURNS

COLUMNS = {
    "success": "win rate",
    "return": "return",
    "progression": "progression",
    "turns": "turns",
    "valid_action_ratio": "valid actions",
}
"""Titles of the columns that every environment has, by key of the record."""
COUNTS = ("n", "failed", "context")
DASH = "–"


@dataclass(frozen=True)
class Cell:
    """Mean and standard error of a column; None where there are too few episodes."""

    mean: float | None
    se: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        n = len(values)
        se = statistics.stdev(values) / n**0.5 if n > 1 else None
        return cls(statistics.fmean(values) if n else None, se, n)

    def text(self, digits: int = 3) -> str:
        if self.mean is None:
            return DASH
        return f"{self.mean:.{digits}f} ± " + (f"{self.se:.{digits}f}" if self.se is not None else DASH)


@dataclass(frozen=True)
class Row:
    """One setting and task; `all` stands for all tasks together."""

    point: SweepPoint
    task: str
    n: int
    """Episodes in the means."""
    failed: int
    """Episodes excluded from the means: their environment was lost, or their prompt was refused."""
    context: int
    """Episodes that ended because the next prompt was too long; they are in the means."""
    cells: Mapping[str, Cell]
    metrics: Mapping[str, Cell]
    """The environment's own numbers of the last turn."""


@dataclass(frozen=True)
class Table:
    """The rows, and the caption that says how to read them."""

    player: str
    rows: Sequence[Row]
    caption: str

    def as_json(self) -> str:
        """All rows with all metrics."""
        rows = [
            {
                "setting": row.point.label,
                "point": dict(row.point.values),
                "task": row.task,
                "player": self.player,
                **{name: getattr(row, name) for name in COUNTS},
                **{name: vars(cell) for name, cell in row.cells.items()},
                "metrics": {name: vars(cell) for name, cell in row.metrics.items()},
            }
            for row in self.rows
        ]
        return json.dumps({"caption": self.caption, "rows": rows}, indent=1, default=str) + "\n"

    def as_csv(self) -> str:
        """One line per row; each column has a second one with its standard error."""
        metrics = sorted({name for row in self.rows for name in row.metrics})
        names = [*COLUMNS, *metrics]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["setting", "task", "player", *COUNTS, *(f"{n}{end}" for n in names for end in ("", "_se"))])
        for row in self.rows:
            cells = {**row.cells, **row.metrics}
            found = (cells.get(name, Cell.of(())) for name in names)
            numbers = ["" if number is None else number for cell in found for number in (cell.mean, cell.se)]
            writer.writerow([row.point.label, row.task, self.player, row.n, row.failed, row.context, *numbers])
        return out.getvalue()

    def as_text(self) -> str:
        """For the terminal: aligned columns."""
        names, lines = self._grid()
        return "\n".join(align(lines, names)) + f"\n\n{self.caption}"

    def as_markdown(self) -> str:
        names, (titles, *lines) = self._grid()
        marks = ["---"] * names + ["---:"] * (len(titles) - names)
        return "\n".join(f"| {' | '.join(line)} |" for line in (titles, marks, *lines)) + f"\n\n{self.caption}\n"

    def _grid(self) -> tuple[int, list[list[str]]]:
        """How many columns name a row, and the titles and rows as texts.

        Left out are the environment's numbers of a group, such as `achievement/place_stone`.
        """
        names = ["setting", "task"] if any(row.point.values for row in self.rows) else ["task"]
        counts = [name for name in COUNTS if name != "context" or any(row.context for row in self.rows)]
        metrics = sorted({name for row in self.rows for name in row.metrics if "/" not in name})
        lines = [[*names, *counts, *COLUMNS.values(), *(name.replace("_", " ") for name in metrics)]]
        for row in self.rows:
            cells = [row.cells[name].text(1 if name == "turns" else 3) for name in COLUMNS]
            cells += [row.metrics.get(name, Cell.of(())).text() for name in metrics]
            named = [row.point.label, row.task][-len(names) :]
            lines.append([*named, *(str(getattr(row, name)) for name in counts), *cells])
        return len(names), lines


def build_table(player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Mapping[str, Any]]) -> Table:
    """Return the table of the episodes that the points name, as far as they were played."""
    table: list[Row] = []
    for point in points:
        tasks = list(dict.fromkeys(task for _, task, _ in point.episodes))
        played = [rows[key] for key in point.episodes if key in rows]
        table += [_row(point, task, [row for row in played if row["task_name"] == task]) for task in tasks]
        if len(tasks) > 1:
            table.append(_row(point, "all", played))
    return Table(player, table, _caption(player, points, rows))


def _row(point: SweepPoint, task: str, episodes: Sequence[Mapping[str, Any]]) -> Row:
    good = [episode for episode in episodes if episode["stop"] != "failed"]
    metrics: dict[str, list[float]] = defaultdict(list)
    for episode in good:
        for name, value in episode["metrics"].items():
            metrics[name].append(float(value))
    return Row(
        point=point,
        task=task,
        n=len(good),
        failed=len(episodes) - len(good),
        context=sum(episode["stop"] == "context" for episode in good),
        cells={name: Cell.of([float(episode[name]) for episode in good]) for name in COLUMNS},
        metrics={name: Cell.of(values) for name, values in metrics.items()},
    )


def _caption(player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Mapping[str, Any]]) -> str:
    wanted = [key for point in points for key in point.episodes]
    played = [rows[key] for key in wanted if key in rows]
    seeds = sorted({key[2] for key in wanted})
    sentences = [
        f"Player {player}, held-out seeds {seeds[0]} to {seeds[-1]}: mean ± standard error over n episodes.",
        "An episode is won if its progression reaches 1.",
    ]
    if failed := sum(row["stop"] == "failed" for row in played):
        sentences.append(f"{failed} failed episodes (environment lost, or prompt refused) are not part of the means.")
    if cut := sum(row["stop"] == "context" for row in played):
        sentences.append(f"{cut} episodes ended because the next prompt was too long (context); they are in the means.")
    if endless := sum(row["stop"] == "max_turns" and row["max_turns"] is None for row in played):
        why = "because neither eval.max_turns nor the environment limits them"
        sentences.append(f"{endless} episodes were ended after {DEFAULT_MAX_TURNS} turns, {why}.")
    if len(played) < len(wanted):
        sentences.append(f"Incomplete: {len(played)} of {len(wanted)} episodes were played.")
    return " ".join(sentences)
