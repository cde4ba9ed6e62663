"""slime's own contract tests for plugins, on our hooks, in every checkout that SLIME_PATH names."""

import re
from pathlib import Path

import pytest

from tests.fixtures.checkouts import CHECKOUTS, ROOT, failure_inside

SECTION = re.compile(r"### slime's plugin contracts\n(.*?)\n## ", re.DOTALL)


def listed(page: Path) -> set[str]:
    """The contracts that the documentation says our hooks do not keep."""
    section = SECTION.search(page.read_text(encoding="utf-8"))
    assert section
    return set(re.findall(r"`(test_\w+(?:\[\w+\])?)`", section[1]))


@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_slimes_contracts_fail_only_where_the_docs_say_why(checkout: str) -> None:
    failed = failure_inside(checkout, "tests.slime.plugin_contracts", "failed")
    assert set((failed or "").split()) == listed(ROOT / "docs" / "slime_inside.md")
    assert failure_inside(checkout, "tests.slime.plugin_contracts", "ran") == "36"
