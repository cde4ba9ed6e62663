"""Fills the tables of docs/results.md from the raw numbers in studies/.

    python scripts/write_results.py                      after a change of a page or of columns
    python scripts/write_results.py outputs/ablations    first adds the finished runs of every study
                                                         on the page to its raw.csv, and draws its
                                                         plot

A study's place on a page begins with the line `<!-- study: NAME -->` and ends with `<!-- end -->`.
A study with planned contrasts has a page in docs/results/, where `<!-- contrasts: NAME -->` and
`<!-- areas: NAME -->` are filled too, and a plot by length.
"""

import re
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from embedded.studies.contrasts import area_lines, contrast_lines  # noqa: E402
from embedded.studies.report import plot, plot_by_length, table_lines, write_csv  # noqa: E402
from embedded.studies.results import Run, read_csv  # noqa: E402
from embedded.studies.study import Study, load_study  # noqa: E402

PAGES = (ROOT / "docs/results.md", *sorted((ROOT / "docs/results").glob("*.md")))
RAW = ROOT / "studies"
PICTURES = ROOT / "docs" / "images"
COMMAND = "python scripts/write_results.py"
TABLES = {"study": table_lines, "contrasts": contrast_lines, "areas": area_lines}
_PLACE = re.compile(r"(<!-- (\w+): (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    """Copy, if a folder is given, and write the pages."""
    for page in PAGES:
        for name in study_names(page) if len(sys.argv) > 1 else ():
            copy_study(Path(sys.argv[1]) / name, name)
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def study_names(page: Path) -> list[str]:
    """List the studies on a page."""
    return list(
        dict.fromkeys(found[3] for found in _PLACE.finditer(page.read_text(encoding="utf-8")))
    )


def copy_study(source: Path, name: str) -> None:
    """Add the raw numbers of the finished runs in `source` to the study's, and draw its plot.

    Runs that were finished elsewhere stay; a run with the same variant and seed is replaced.
    """
    if not (source / "raw.csv").is_file():
        return
    (RAW / name).mkdir(exist_ok=True)
    study = load_study(name)
    picture = source / "plot.png"
    new = [run for run in read_csv(source / "raw.csv", study.measure) if run.done]
    runs = {(run.variant, run.seed): run for run in [*finished_runs(study), *new]}
    order = list(study.variants)
    write_csv(
        RAW / name / "raw.csv",
        sorted(runs.values(), key=lambda run: (order.index(run.variant), run.seed)),
    )
    by_length = all(variant.rpartition("_")[2].isdigit() for variant in order)
    (plot_by_length if by_length else plot)(picture, study, finished_runs(study))
    # A palette makes the file a quarter as large.
    Image.open(picture).convert("RGB").quantize(64).save(PICTURES / f"{name}.png", optimize=True)


def finished_runs(study: Study) -> list[Run]:
    """Read the finished runs in a study's raw.csv; none if it has not been run yet."""
    path = RAW / study.name / "raw.csv"
    return [run for run in read_csv(path, study.measure) if run.done] if path.exists() else []


def filled(page: str) -> str:
    """Write every table of the page anew."""

    def table(found: re.Match[str]) -> str:
        study = load_study(found[3])
        return "\n".join([found[1], *TABLES[found[2]](study, finished_runs(study)), "\n"])

    return _PLACE.sub(table, page)


if __name__ == "__main__":
    main()
