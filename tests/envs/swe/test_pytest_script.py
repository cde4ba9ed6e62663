"""The plugin that reports on a repository's tests, run by pytest in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
