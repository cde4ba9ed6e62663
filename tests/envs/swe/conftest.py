"""What several tests of the sandbox need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.swe.sandbox.workspace import hand_over, remove_tree
from envs.swe.verdict import calibration
from tests.envs.swe.tiny_repository import needs_sandbox
from tests.envs.users import open_way


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare one run of a reference solution instead of five: those of the tests' own tasks are
    not random."""
    monkeypatch.setattr(calibration, "_RUNS", 1)
    monkeypatch.setattr(calibration, "DRAWS", 1)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """An empty tree that belongs to the agent's user. Skips where the sandbox cannot run."""
    needs_sandbox()
    tree = tmp_path / "tree"
    tree.mkdir()
    open_way(tmp_path)
    hand_over(tree)
    yield tree
    # Some are deeper than pytest's own cleaning up can reach.
    remove_tree(tree)
