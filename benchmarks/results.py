"""A benchmark's results: a JSON file with one row per case, and a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write(path: Path, benchmark: str, rows: Sequence[Row]) -> None:
    """Write the rows, with the machine's load and what ran them."""
    about = {"benchmark": benchmark, "load_average": list(os.getloadavg()), "python": platform.python_version()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> str:
    """The rows as text; `columns` are (heading, format string over the row's keys)."""
    cells = [[heading for heading, _ in columns], *([form.format(**row) for _, form in columns] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    first, *rest = ([*zip(line, widths, strict=True)] for line in cells)
    return "\n".join(
        line[0][0].ljust(line[0][1]) + "".join("  " + cell.rjust(width) for cell, width in line[1:])
        for line in (first, *rest)
    )
