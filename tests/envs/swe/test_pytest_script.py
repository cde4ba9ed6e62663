"""The report on a repository's tests: the plugin that writes it, in a separate process, and how it is read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.swe.sandbox.supervise import Outcome
from envs.swe.verdict.evaluate import TestRun, read_report

REPOSITORY = Path(__file__).parents[3]
CONFTEST = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xfail)
"""
RUN = """
import sys
sys.path[:0] = [{scripts!r}]
import pytest, pytest_script
judge = pytest_script.Judge(lambda kind, **values: print("TOLD", kind, values), ["test_it.py::test_it"])
pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[judge])
"""


def test_marks_that_a_conftest_adds_last_are_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n\n\ndef test_other():\n    pass\n")
    code = RUN.format(scripts=str(REPOSITORY / "envs" / "swe" / "verdict"))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    assert "TOLD collected {'ids': ['test_it.py::test_it', 'test_it.py::test_other']}" in told
    assert "TOLD marked {'ids': ['test_it.py::test_it']}" in told


IT = "test_it.py::test_it"
END = {"kind": "end", "code": 0}


def _read(*records: object, returncode: int = 0) -> TestRun:
    report = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    return read_report(Outcome(returncode=returncode, output="", report=report))


def _phase(outcome: str, xfail: bool = False) -> dict[str, Any]:
    return {"kind": "phase", "id": IT, "outcome": outcome, "xfail": xfail}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([_phase("passed")], "did not run to their end"),
        ([_phase("passed"), {"kind": "end"}], "differ"),
        ([_phase("passed"), {"kind": "end", "code": float("inf")}], "tampered"),
        ([{"kind": "marked", "ids": 5}, END], "tampered"),
        ([{"kind": "nonsense"}, END], "tampered"),
        ([_phase("green"), END], "tampered"),
        ([_phase("passed"), 7, END], "tampered"),
    ],
)
def test_a_report_that_the_plugin_did_not_write_does_not_count(records: list[object], reason: str) -> None:
    run = _read(*records)
    assert reason in run.reason and not run.outcomes


@pytest.mark.parametrize(
    ("phases", "marked", "outcome"),
    [
        ([_phase("passed")], [], "passed"),
        ([_phase("passed"), _phase("failed")], [], "failed"),
        ([_phase("skipped", xfail=True)], [IT], "xfailed"),
        ([_phase("skipped", xfail=True)], [], "skipped"),
    ],
)
def test_a_test_is_as_good_as_its_worst_phase_and_fails_as_expected_only_with_a_mark(
    phases: list[object], marked: list[str], outcome: str
) -> None:
    run = _read({"kind": "marked", "ids": marked}, *phases, END)
    assert run.outcomes == {IT: outcome} and bool(run.green) == (outcome in ("passed", "xfailed"))
