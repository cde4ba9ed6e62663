"""Turns and whole episodes in the data path of every supported framework: miles from PyPI, slime from SLIME_PATH."""

import ast
from pathlib import Path

import pytest

from tests.fixtures.frameworks import FRAMEWORKS, SLIME, failure_inside


def checks(program: str) -> list[str]:
    """Names of the checks that a program beside this file runs."""
    body = ast.parse(Path(__file__).with_name(f"{program}.py").read_text(encoding="utf-8")).body
    assigned = {getattr(node.targets[0], "id", ""): node.value for node in body if isinstance(node, ast.Assign)}
    return [name.id for name in assigned["CHECKS"].elts]


@pytest.mark.parametrize("check", checks("data_path"))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_inside_the_framework(framework: str, check: str) -> None:
    failure = failure_inside(framework, "tests.slime.data_path", check)
    assert failure is None, failure


@pytest.mark.parametrize("check", checks("whole_episodes"))
@pytest.mark.parametrize("framework", SLIME)
def test_whole_episodes_inside_slime(framework: str, check: str) -> None:
    """miles is left out: it cuts off every sample beyond a whole number of steps."""
    failure = failure_inside(framework, "tests.slime.whole_episodes", check)
    assert failure is None, failure
