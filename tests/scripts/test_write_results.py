"""Runs of a study that were finished on several machines are joined, and none is lost."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from embedded.studies.report import write_csv
from embedded.studies.results import Run
from scripts import write_results

STUDY = "fixed_turn"


def run(seed: int, value: float, done: bool = True) -> Run:
    rows = [{"turns": turns, "eval/success": value} for turns in (0.0, 256.0)]
    return Run("fixed_turn", seed, rows, done)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with seeds 0 and 1, and one of another machine with seeds 1 and 2, and 3
    unfinished."""
    raw, pictures, other = (tmp_path / name for name in ("raw", "pictures", "other"))
    for folder in (raw / STUDY, pictures, other):
        folder.mkdir(parents=True)
    monkeypatch.setattr(write_results, "RAW", raw)
    monkeypatch.setattr(write_results, "PICTURES", pictures)
    write_csv(raw / STUDY / "raw.csv", [run(0, 0.123456789), run(1, 0.1)])
    write_csv(other / "raw.csv", [run(1, 0.9), run(2, 0.2), run(3, 0.3, done=False)])
    Image.new("RGB", (8, 8)).save(other / "plot.png")
    return other


def test_finished_runs_are_added_and_the_others_stay(machine: Path) -> None:
    write_results.copy_study(machine, STUDY)
    write_results.copy_study(machine, STUDY)  # again, which changes nothing
    with open(write_results.RAW / STUDY / "raw.csv", encoding="utf-8", newline="") as file:
        last = {
            (row["seed"], row["finished"]): float(row["eval/success"])
            for row in csv.DictReader(file)
        }
    assert last == {("0", "True"): 0.123457, ("1", "True"): 0.9, ("2", "True"): 0.2}
