"""Fills the tables of docs/results.md from the raw numbers in docs/results/.

    python scripts/write_results.py                       after a change of the page or of the tables' columns
    python scripts/write_results.py outputs/ablations     first copies raw.csv and plot.png of every study on the page

A study's place on the page begins with the line `<!-- study: NAME -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from embedded.studies.report import table_lines  # noqa: E402
from embedded.studies.results import read_csv  # noqa: E402
from embedded.studies.study import load_study  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
RAW = ROOT / "docs" / "results"
PICTURES = ROOT / "docs" / "images"
COMMAND = "python scripts/write_results.py"
_PLACE = re.compile(r"(<!-- study: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    """Copy, if a folder is given, and write the page."""
    if len(sys.argv) > 1:
        for name in study_names():
            copy_study(Path(sys.argv[1]) / name, name)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def study_names() -> list[str]:
    """The studies on the page."""
    return [found[2] for found in _PLACE.finditer(PAGE.read_text(encoding="utf-8"))]


def copy_study(source: Path, name: str) -> None:
    """Copy the raw numbers and the plot of a study that has been run in `source`."""
    if (source / "raw.csv").is_file():
        (RAW / name).mkdir(exist_ok=True)
        shutil.copyfile(source / "raw.csv", RAW / name / "raw.csv")
        # A palette makes the file a quarter as large.
        Image.open(source / "plot.png").convert("RGB").quantize(64).save(PICTURES / f"{name}.png", optimize=True)


def filled(page: str) -> str:
    """The page with every table written anew."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{table_of(found[2])}\n\n", page)


def table_of(name: str) -> str:
    """A study's table in Markdown.

    Raises:
        FileNotFoundError: docs/results/ lacks the study's raw.csv.
    """
    study = load_study(name)
    runs = read_csv(RAW / name / "raw.csv", study.measure)
    return "\n".join(table_lines(study, [run for run in runs if run.done]))


if __name__ == "__main__":
    main()
