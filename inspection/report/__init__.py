"""What the answers of a run show, before training and during it.

Answers four questions with numbers, verdicts and advice: are reasoning paths diverse, is there enough reasoning before
the action, what share of actions is valid, and how do episodes fail.

    slime-verlog report outputs/evaluation
    slime-verlog report outputs/update_0 outputs/update_20     # side by side, with alarms over updates

RUN is a folder with episodes.jsonl, or the file. Settings and players of one file become columns. The report is written
beside the first run: report.md and report.json. docs/report.md explains every number.
"""

import argparse
import shlex
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with episodes.jsonl, or the file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write; default: beside the first run")
    parser.add_argument("--actions", metavar="A,B,...", help="legal actions; default: the game's, or those executed")


def run(options: argparse.Namespace) -> int:
    """Read, judge, print and write."""
    from embedded.run.ending import PROGRAM
    from inspection.report.columns import find_alarms, read_columns
    from inspection.report.output import summarize, write_json, write_page
    from slime_verlog import ConfigError

    actions = [name.strip() for name in (options.actions or "").split(",") if name.strip()]
    columns = read_columns(options.runs, actions)
    alarms = find_alarms(columns)
    first = options.runs[0]
    folder = options.out or (first if first.is_dir() else first.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", columns, alarms)
        write_page(folder / "report.md", columns, alarms)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another folder with --out") from error
    see = f"See the episodes: {PROGRAM} view {shlex.quote(str(first))}"
    written = [f"Written to {folder}: report.md, report.json", see]
    print(summarize(columns, alarms, written))
    return 0
