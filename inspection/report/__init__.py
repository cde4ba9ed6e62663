"""What the answers of a run show, before training and during it.

Answers four questions with numbers, verdicts and advice: are reasoning paths diverse, is there
enough reasoning before the action, what share of actions is valid, and how do episodes fail.

    slime-verlog report outputs/evaluation
    slime-verlog report outputs/update_0 outputs/update_20     # side by side

RUN is a folder with episodes.jsonl, or the file. Settings and players of one file become columns.
The report is written beside the first run: report.md and report.json. docs/report.md explains every
number.
"""

import argparse
import shlex
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder with episodes.jsonl, or the file"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write; default: beside the first run"
    )


def run(options: argparse.Namespace) -> int:
    """Read, judge, write and print."""
    from embedded.run.ending import PROGRAM
    from embedded.run.folder import write_text
    from inspection.report.columns import read_columns
    from inspection.report.output import render_json, render_page

    columns = read_columns(options.runs)
    page = render_page(columns)
    first = options.runs[0]
    folder = options.out or (first if first.is_dir() else first.parent)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", render_json(columns))
    write_text(folder / "report.md", page)
    print(page)
    print(f"Written to {folder}: report.md, report.json")
    print(f"See the episodes: {PROGRAM} view {shlex.quote(str(first))}")
    return 0
