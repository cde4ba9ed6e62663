"""Jobs in processes: one that is killed is reported, the others finish, and an interrupt leaves
none behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embedded.studies.run import run_processes
from slime_verlog import ConfigError

ROOT = Path(__file__).parents[3]


def job(folder: str, name: str) -> None:
    """End as `name` says."""
    (Path(folder) / name).write_text(str(os.getpid()))
    match name:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "refused":
            raise ConfigError("lr must be positive")
        case "endless" | "endless too":
            time.sleep(600)


@pytest.mark.slow
def test_a_killed_job_is_reported_and_the_others_finish(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["killed", "refused", "fine", "fine too"]
    failures = run_processes({name: (str(tmp_path), name) for name in names}, job, at_once=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert sorted(failures) == [
        "killed was killed by SIGKILL (often for lack of memory; fewer --jobs need less)",
        "refused failed with exit code 1",
    ]
    printed = capfd.readouterr()
    assert "fine too: done" in printed.out and "error: refused: lr must be positive" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_all_jobs_end_with_their_parent_and_without_a_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    jobs = {name: (str(tmp_path), name) for name in ("endless", "endless too")}
    script = tmp_path / "main.py"
    script.write_text(
        "from embedded.studies.run import run_processes\n"
        "from tests.embedded.studies.test_processes import job\n"
        f"if __name__ == '__main__':\n    try:\n        run_processes({jobs!r}, job, 2)\n"
        "    except KeyboardInterrupt:\n        raise SystemExit('interrupted')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    # Its own session, so that only the parent gets the signal.
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        pids = [_pid(tmp_path / name) for name in jobs]
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=60)
    interrupted = number is signal.SIGINT
    assert "Traceback" not in errors and (errors == "interrupted\n") == interrupted
    assert parent.returncode == (1 if interrupted else -number)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _pid(path: Path) -> int:
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)
    return int(path.read_text())
