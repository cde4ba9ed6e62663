"""The report on a repository's tests: the plugin that makes it, in a separate process, and how it
is read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.swe.sandbox.supervise import Outcome
from envs.swe.verdict.evaluate import read_report
from envs.swe.verdict.reports import NotCounted

REPOSITORY = Path(__file__).parents[3]
CONFTEST = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_marked_late":
            item.add_marker(pytest.mark.xfail)
"""
TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_marked_late():
    assert False

def test_gives_up():
    pytest.xfail("by the code under test")

def test_torn_down(broken):
    pass

def test_fine():
    pass

def test_other():
    pass
"""
RUN = """
import sys
sys.path[:0] = [{scripts!r}]
import pytest, pytest_script
judge = pytest_script.Judge(["test_it.py::test_" + name for name in ("marked_late", "gives_up", "torn_down", "fine")])
pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[judge])
print("TOLD", len(judge.collected), judge.outcomes)
"""


def test_a_test_is_as_good_as_its_worst_phase_and_fails_as_expected_only_with_a_mark(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    code = RUN.format(scripts=str(REPOSITORY / "envs" / "swe" / "verdict"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    words = {
        "marked_late": "xfailed",
        "gives_up": "skipped",
        "torn_down": "failed",
        "fine": "passed",
    }
    assert (
        f"TOLD 5 { {f'test_it.py::test_{name}': word for name, word in words.items()} }"
        in done.stdout
    )


IT = "test_it.py::test_it"
GREEN: dict[str, Any] = {
    "code": 0,
    "collected": [IT],
    "uncollectable": [],
    "outcomes": {IT: "passed"},
}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "did not run to their end"),
        ([GREEN, GREEN], "reported it twice"),
        ([{**GREEN, "code": 1}], "differ"),
        ([{**GREEN, "code": float("inf")}], "tampered"),
        ([{**GREEN, "collected": 5}], "tampered"),
        ([{**GREEN, "outcomes": {IT: "green"}}], "tampered"),
        ([{**GREEN, "more": 1}], "tampered"),
        ([7, GREEN], "tampered"),
    ],
)
def test_a_report_that_the_script_did_not_write_does_not_count(
    records: list[object], reason: str
) -> None:
    report = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    with pytest.raises(NotCounted, match=reason):
        read_report(Outcome(returncode=0, output="", report=report))


@pytest.mark.parametrize(
    ("outcome", "is_green"), [("passed", True), ("xfailed", True), ("skipped", False)]
)
def test_expected_failures_are_green(outcome: str, is_green: bool) -> None:
    report = json.dumps({**GREEN, "outcomes": {IT: outcome}}).encode()
    assert read_report(Outcome(returncode=0, output="", report=report)).green == frozenset(
        [IT] * is_green
    )
