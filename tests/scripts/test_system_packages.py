"""System packages of the tests: installed where that is possible, required in CI, named
elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import missing_system_packages
from tests.scripts.conftest import REPO


def _need(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """Ask for a package where PATH holds `id` and what is in `folder`, and nothing else."""
    folder.mkdir(exist_ok=True)
    if not (folder / "id").exists():
        os.symlink(shutil.which("id"), folder / "id")
    script = "set -euo pipefail; source scripts/lib/system_packages.sh; need_package bwrap bubblewrap; echo went on"
    environment = {"PATH": str(folder), "CI": ci}
    argv = ["/bin/bash", "-c", script]
    return subprocess.run(
        argv, cwd=REPO, env=environment, capture_output=True, text=True, check=False
    )


def test_a_package_that_cannot_be_had_stops_ci_and_nothing_else(tmp_path: Path) -> None:
    done = _need(tmp_path / "bin", "true")
    assert done.returncode == 1 and "bubblewrap is needed and could not be installed" in done.stderr
    assert _need(tmp_path / "bin", "").stdout == "went on\n"


def test_a_program_that_is_there_is_enough(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "bwrap").chmod(0o755)
    assert _need(tmp_path / "bin", "true").stdout == "went on\n"


def test_the_summary_names_the_packages_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    line = missing_system_packages()
    assert line.startswith("apt-get install -y bubblewrap git build-essential") and "\n" not in line
