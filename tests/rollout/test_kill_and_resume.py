"""A run that is killed at any moment and started again plays the batches of a run that was never
killed."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.resumable_run import MOMENTS, log_of, newest, run
from tests.fixtures.warm_python import CONTEXT


def start(folder: Path, batches: int, kill_at: str | None = None) -> Any:
    process = CONTEXT.Process(target=run, args=(folder, batches, kill_at))
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(300)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def unbroken(folder: Path, batches: int) -> tuple[dict[int, str], float]:
    """The truth: every batch's hash, and the seconds that a batch takes."""
    began = time.monotonic()
    assert finish(start(folder, batches)) == 0
    return dict(log_of(folder)), (time.monotonic() - began) / batches


def kill_at_random(folder: Path, batches: int, within_s: float, generator: random.Random) -> bool:
    """Start the run and kill it at some moment after its next batch; whether it was still alive
    then."""
    before = len(log_of(folder))
    process = start(folder, batches)
    while process.is_alive() and len(log_of(folder)) == before:
        time.sleep(0.005)
    process.join(generator.uniform(0.0, within_s))
    process.kill()
    return finish(process) == -signal.SIGKILL


def check(truth: dict[int, str], folder: Path, batches: int) -> None:
    played = log_of(folder)
    assert sorted({number for number, _ in played}) == list(range(batches)), "no batch is missing"
    assert all(truth[number] == content for number, content in played), (
        "played again, a batch is the same"
    )
    assert newest(folder) == batches - 1
    # A kill between the last rename and the removal of the empty folder it came from leaves that
    # folder.
    files = [path for path in (folder / "save" / "rollout").rglob("*") if path.is_file()]
    left = [path.name for path in files if path.suffix != ".pt" or path.parent.name == ".writing"]
    assert not left, "no file is left behind by a run that was killed as it wrote"


@pytest.mark.slow
def test_a_run_killed_while_it_saves_or_at_random_continues_with_the_same_batches(
    tmp_path: Path,
) -> None:
    batches, folder = 9, tmp_path / "killed"
    (tmp_path / "whole").mkdir()
    folder.mkdir()
    truth, batch_s = unbroken(tmp_path / "whole", batches)
    for moment in MOMENTS:
        assert finish(start(folder, batches, moment)) == -signal.SIGKILL
    kill_at_random(folder, batches, 2 * batch_s, random.Random(0))
    assert finish(start(folder, batches)) == 0
    assert len(log_of(folder)) > batches, (
        "some batch was played, lost with its process and played again"
    )
    check(truth, folder, batches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_run_killed_at_many_random_moments_continues_with_the_same_batches(
    tmp_path: Path, seed: int
) -> None:
    batches, folder, generator = 40, tmp_path / "killed", random.Random(seed)
    (tmp_path / "whole").mkdir()
    folder.mkdir()
    truth, batch_s = unbroken(tmp_path / "whole", batches)
    kills = 0
    while newest(folder) < batches - 1:
        kills += kill_at_random(folder, batches, 3 * batch_s, generator)
    assert kills >= 5
    assert finish(start(folder, batches)) == 0
    check(truth, folder, batches)
