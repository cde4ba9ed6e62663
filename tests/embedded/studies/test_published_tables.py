"""The tables on the results pages follow from the committed CSV files."""

from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="needs pip install 'slime-verlog[studies]'")

from scripts.write_results import PAGES, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_tables_follow_from_the_committed_numbers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text
