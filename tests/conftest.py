"""What all tests share: the recordings, and the system packages that would unlock skipped tests."""

import gc
import gzip
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no failure: examples are bounded in number, not in wall time.
settings.register_profile("default-without-deadline", deadline=None)
settings.load_profile("default-without-deadline")

# Imports leave little garbage. What they made is not looked through again in each collection while
# the tests run.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# A shell starts background jobs with Ctrl-C ignored, and the commands that the tests start would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

RECORDINGS = Path(__file__).parent / "recordings"


def load_recording(name: str) -> Any:
    """Read one recording of BALROG's or Verlog's own code."""
    with gzip.open(RECORDINGS / name, "rt", encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture(autouse=True)
def _unknown_servers() -> None:
    """Forget what OpenEnv servers of earlier tests said: the system may give their ports to other
    servers."""
    if session := sys.modules.get("envs.openenv.session"):
        session._first.clear()


SYSTEM_PACKAGES = {
    "bwrap": ("bubblewrap", "the SWE environment"),
    "git": ("git", "the SWE environment"),
    "cc": ("build-essential", "TextWorld and ALFWorld"),
    "java": ("default-jre-headless", "ScienceWorld"),
}
"""Programs that tests look for: the Debian package, and what is skipped without it."""


def missing_system_packages() -> str:
    """One line that says which system packages would unlock what; empty if all are there."""
    missing = [words for program, words in SYSTEM_PACKAGES.items() if shutil.which(program) is None]
    unlocked = ", ".join(f"{package} ({tests})" for package, tests in missing)
    packages = " ".join(package for package, _ in missing)
    return (
        f"apt-get install -y {packages} would unlock skipped tests: {unlocked}" if missing else ""
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if line := missing_system_packages():
        terminalreporter.write_line(line)
