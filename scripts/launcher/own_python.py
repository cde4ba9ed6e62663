"""Gives the launcher a Python that has what it imports, on a machine where nothing is installed yet."""

import importlib.util
import os
import subprocess
import sys


def ensure_packages() -> None:
    """Start this program again in .venv, which `scripts/install.sh` makes, if this Python lacks a package."""
    is_complete = importlib.util.find_spec("pydantic") and importlib.util.find_spec("yaml")
    if is_complete and sys.version_info >= (3, 11):
        return
    folder = os.environ.get("VENV") or ".venv"
    if os.path.realpath(sys.prefix) == os.path.realpath(folder):
        sys.exit(f"error: {folder} lacks pydantic or PyYAML; delete it, and run: bash scripts/install.sh")
    command = ["bash", "-c", "source scripts/install.sh; install_launcher"]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    python = os.path.join(folder, "bin", "python")
    os.execv(python, [python, *sys.orig_argv[1:]])
