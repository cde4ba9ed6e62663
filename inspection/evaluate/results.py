"""Writes what a run found: the table in four formats, the plot of a sweep, and the commands to go on with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from inspection.evaluate.folder import RunFolder
from inspection.evaluate.plots import plot_sweep
from inspection.evaluate.points import Point
from inspection.evaluate.table import Table, build_table
from slime_verlog import MissingDependencyError


def write(folder: RunFolder, points: Sequence[Point]) -> Table:
    """Write the table and the plot of the episodes so far, and print the table."""
    table = build_table(folder.player, points, folder.rows)
    formats = {"json": table.as_json(), "csv": table.as_csv(), "md": table.as_markdown(), "tex": table.as_latex()}
    for suffix, text in formats.items():
        folder.write(f"table.{suffix}", text)
    written = [f"table.{{{','.join(formats)}}}"]
    print(table.as_text())
    if points[0].values:
        try:
            plot_sweep(table, folder.path / "sweep.png")
            written.append("sweep.png")
        except MissingDependencyError as error:
            print(f"no plot: {error}", file=sys.stderr)
    print(f"\nwritten to {folder.path}: episodes.jsonl, {', '.join(written)}")
    name = shlex.quote(str(folder.path))
    print(f"read the episodes:  slime-verlog view {name}\nsee what to change: slime-verlog report {name}", flush=True)
    return table
