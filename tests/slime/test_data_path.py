"""Turns in the real types and data path of every supported framework: miles from PyPI, slime from SLIME_PATH."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.frameworks import miles_folder, slime_checkouts

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("data_path.py")
CHECKOUTS = {f"slime at {path}": path for path in slime_checkouts()} or {"slime": None}


def checks() -> list[str]:
    """Names of the checks that `data_path.py` runs."""
    body = ast.parse(PROGRAM.read_text(encoding="utf-8")).body
    assigned = {getattr(node.targets[0], "id", ""): node.value for node in body if isinstance(node, ast.Assign)}
    return [name.id for name in assigned["CHECKS"].elts]


@pytest.fixture(scope="module")
def run_in() -> Any:
    """Outcomes of all checks in a framework; each framework's program runs once."""
    known: dict[str, dict[str, str | None]] = {}

    def run(name: str, folder: Path) -> dict[str, str | None]:
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[embedded]'")
        pytest.importorskip("ray", reason="the frameworks need ray: pip install ray httpx")
        if str(folder) not in known:
            path = os.pathsep.join([str(ROOT), str(folder)])
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", "-m", "tests.slime.data_path", name]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
            known[str(folder)] = json.loads(done.stdout.splitlines()[-1])
        return known[str(folder)]

    return run


@pytest.mark.parametrize("check", checks())
def test_inside_miles(run_in: Any, check: str) -> None:
    folder = miles_folder()
    if isinstance(folder, str):
        pytest.skip(f"{folder}; connect to the package registry once")
    failure = run_in("miles", folder)[check]
    assert failure is None, failure


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_inside_slime(run_in: Any, checkout: str, check: str) -> None:
    if CHECKOUTS[checkout] is None:
        pytest.skip("needs a slime checkout: set SLIME_PATH (several checkouts are separated by colons)")
    failure = run_in("slime", CHECKOUTS[checkout])[check]
    assert failure is None, failure
