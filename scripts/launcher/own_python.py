"""Gives the launcher a Python that has what it imports, on a machine where nothing is installed
yet."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ensure_packages() -> None:
    """Start this program again in .venv, which `scripts/install.sh` makes, if this Python lacks a
    package."""
    is_complete = importlib.util.find_spec("pydantic") and importlib.util.find_spec("yaml")
    if is_complete and sys.version_info >= (3, 11):
        return
    if {"--help", "-h"} & set(sys.argv):
        print(header(os.path.basename(sys.argv[1])))
        print(
            "\nA Python 3.11 or 3.12 with pydantic and PyYAML shows options and variables, too: "
            "bash scripts/install.sh"
        )
        sys.exit()
    folder = os.environ.get("VENV") or ".venv"
    if os.path.realpath(sys.prefix) == os.path.realpath(folder):
        sys.exit(
            f"error: {folder} lacks pydantic or PyYAML; delete it, and run: bash scripts/install.sh"
        )
    command = ["bash", "-c", "source scripts/install.sh; install_launcher"]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    python = os.path.join(folder, "bin", "python")
    os.execv(python, [python, *sys.orig_argv[1:]])


def header(script: str) -> str:
    """Return the comment at the head of a script."""
    lines = (ROOT / "scripts" / script).read_text(encoding="utf-8").splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])
