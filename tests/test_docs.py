"""Documents name files and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = sorted([*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"])
NAMED = re.compile(r"`(tests/[\w./-]*\w)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for path, test in NAMED.findall(document.read_text(encoding="utf-8")):
        file = REPOSITORY / path
        assert file.exists(), f"{document.name} names {path}"
        if test:
            found = {node.name for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "name")}
            assert test in found, f"{document.name} names {path}::{test}"


def test_every_promise_of_reliability_names_the_test_that_shows_it() -> None:
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    promises = text.split("## Reading the counters", 1)[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert len(rows) > 20
    assert all(NAMED.search(row.rsplit("|", 2)[1]) and "::" in row for row in rows)
    assert "…" not in promises, "names are written out, so that they can be checked"
