"""A full disk or a folder that cannot be written ends a command in one sentence, and leaves no half
files."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inspection.init import write_files
from inspection.records import read_episodes
from slime_verlog import command
from tests.fixtures.played_episodes import invented_episode, write_run

ROOT = Path(__file__).parents[2]
GAME = "{rollout_interaction_env_path: tests.fixtures.counting_env, tasks: [count], env_backend: inline}"
LIMIT = 200
"""Bytes after which no file can grow, which stands for a full disk."""


def run(folder: Path, words: str, limit: int = LIMIT) -> str:
    """Run `slime-verlog` in a folder; return what it wrote to stderr."""

    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = [sys.executable, "-B", "-m", "inspection", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    given: dict[str, Any] = {
        "cwd": folder,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "preexec_fn": fill_disk,
    }
    done = subprocess.run(line, text=True, capture_output=True, **given)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_init_writes_all_files_or_none(tmp_path: Path) -> None:
    assert run(tmp_path, "init lights").endswith("lights.py: File too large; free some space\n")
    assert not files(tmp_path)
    with pytest.raises(FileNotFoundError):
        write_files({tmp_path / "first": "a", tmp_path / "missing" / "second": "b"})
    assert not files(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "view run --worlds 0 --out page.html",
        "export run --out rows.jsonl",
    ],
)
def test_what_does_not_fit_leaves_nothing(tmp_path: Path, words: str) -> None:
    write_run(tmp_path / "run", [invented_episode(seed) for seed in range(3)])
    before = files(tmp_path)
    out = words.split()[-1]
    assert "File too large" in run(tmp_path, words)
    assert files(tmp_path) == before and not (tmp_path / out).exists()


@pytest.mark.slow
def test_a_record_that_does_not_fit_is_not_written_in_part(tmp_path: Path) -> None:
    (tmp_path / "game.yaml").write_text(GAME)
    out = tmp_path / "out"
    words = f"evaluate game.yaml --player random --out {out} --episodes 4"
    error = run(tmp_path, words, limit=3000)
    assert "episodes.jsonl: File too large; free some space" in error
    assert all(episode["story"] for episode in read_episodes(out))
    assert (out / "episodes.jsonl").read_bytes()[-1:] in (b"", b"\n")


@pytest.mark.slow
def test_train_ends_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
    (tmp_path / "game.yaml").write_text(GAME)
    assert "File too large; free some space" in run(tmp_path, "train game.yaml --out out")
    assert not [name for name in files(tmp_path) if name.startswith("out/.")], (
        "no temporary file is left"
    )


def test_another_error_of_the_system_keeps_its_traceback() -> None:
    with pytest.raises(ConnectionResetError), command():
        raise ConnectionResetError(errno.ECONNRESET, "reset")
