"""The report on a repository's tests: the plugin that writes it, in a separate process, and how it is read."""

import hashlib
import hmac
import json
import subprocess
import sys
from collections.abc import Sequence
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


KEY = b"of the judge"
Record = tuple[str, dict[str, Any]]


def _records(outcome: str = "passed", marked: Sequence[str] = (), xfail: bool = False) -> list[Record]:
    """What the plugin tells about one test."""
    test = "test_it.py::test_it"
    called = {"setup": "passed", "call": outcome, "teardown": "passed"}
    phases = [("phase", {"id": test, "when": when, "outcome": word, "xfail": xfail}) for when, word in called.items()]
    around = {"start": ("start", {"id": test}), "finish": ("finish", {"id": test}), "end": ("end", {"code": 0})}
    told = [("collected", {"ids": [test]}), ("marked", {"ids": list(marked)}), around["start"]]
    return [*told, *phases, around["finish"], around["end"]]


def _lines(records: list[Record], key: bytes = KEY) -> list[bytes]:
    numbered = [{"number": number, "kind": kind, **fields} for number, (kind, fields) in enumerate(records)]
    bodies = [json.dumps(record).encode() for record in numbered]
    return [hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b" " + body for body in bodies]


def _read(lines: list[bytes]) -> TestRun:
    return read_report(Outcome(returncode=0, output="", report=b"\n".join(lines)), KEY)


def test_a_signed_report_counts() -> None:
    run = _read(_lines(_records()))
    assert not run.reason and run.green == run.outcomes.keys() == {"test_it.py::test_it"}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (_lines(_records(), b"of a forger"), "tampered"),
        ([line.replace(b"failed", b"passed") for line in _lines(_records("failed"))], "tampered"),
        ([*_lines(_records())[:-1], _lines(_records(), b"of a forger")[-1]], "tampered"),
        (_lines(_records())[:3] + _lines(_records())[4:], "has a gap"),
        (_lines(_records())[:-1], "did not run to their end"),
        (_lines([*_records()[:-1], ("end", {})]), "differ"),
        (_lines([*_records()[:-1], ("end", {"code": float("inf")})]), "tampered"),
        (_lines([("marked", {"ids": 5}), *_records()]), "tampered"),
        (_lines([("nonsense", {}), *_records()]), "tampered"),
    ],
    ids=[
        "another key",
        "changed",
        "one line forged",
        "gap",
        "no end",
        "no code",
        "infinite",
        "ids that are no list",
        "unknown kind",
    ],
)
def test_a_report_that_the_plugin_did_not_write_does_not_count(lines: list[bytes], reason: str) -> None:
    run = _read(lines)
    assert reason in run.reason and not run.outcomes


@pytest.mark.parametrize(("marked", "outcome"), [(["test_it.py::test_it"], "xfailed"), ([], "skipped")])
def test_a_test_fails_as_expected_only_with_a_mark(marked: list[str], outcome: str) -> None:
    run = _read(_lines(_records("skipped", marked, xfail=True)))
    assert list(run.outcomes.values()) == [outcome] and bool(run.green) == bool(marked)
