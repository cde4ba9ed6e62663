"""Turns in the real types and data path of every supported framework: miles from PyPI, slime from SLIME_PATH."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.fixtures.frameworks import FRAMEWORKS, failure_inside

PROGRAM = Path(__file__).with_name("data_path.py")


def checks() -> list[str]:
    """Names of the checks that `data_path.py` runs."""
    body = ast.parse(PROGRAM.read_text(encoding="utf-8")).body
    assigned = {getattr(node.targets[0], "id", ""): node.value for node in body if isinstance(node, ast.Assign)}
    return [name.id for name in assigned["CHECKS"].elts]


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_inside_the_framework(framework: str, check: str) -> None:
    failure = failure_inside(framework, "tests.slime.data_path", check)
    assert failure is None, failure
