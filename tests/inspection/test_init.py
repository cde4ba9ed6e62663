"""`slime-verlog init`: the files that it writes pass their own test, whatever the words; nothing is
overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_verlog import read_yaml
from tests.fixtures.command import error_of, slime_verlog

REPOSITORY = Path(__file__).parents[2]
WORDS = {
    "defaults": [],
    "hostile": [
        *("--goal", 'it\'s """odd""" {{ goal }} \\x {% raw %}', "--max-steps", "7"),
        *("--actions", 'say "hi"', "turn \\n", "{braces}", "#é"),
    ],
    "short": ["--actions", "a", "b", "--max-steps", "2"],
    "many_actions": ["--actions", *"abcdefg", "--max-steps", "5"],
}
"""By the name of the environment."""


def test_what_it_writes_passes_its_own_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in WORDS.items():
        assert slime_verlog("init", name, *words) == 0
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["yes", "null"])
def test_a_name_that_yaml_reads_as_something_else_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert slime_verlog("init", name, "--actions", "yes", "no") == 0
    assert read_yaml(f"{name}.yaml", "YAML")["tasks"] == [name]


def test_existing_files_and_wrong_words_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_lights.py").write_text("mine")
    for words, said in {
        ("lights",): "test_lights.py exists",
        ("random",): "would hide a module of Python's",
        ("numpy",): "would hide an installed module",
        ("class",): "cannot name an environment",
        ("../up",): "cannot name an environment",
        ("one", "--actions", "a"): "at least two actions",
        ("one", "--actions", "Up", "up"): "differ in more than case",
        ("one", "--actions", "ACTION: up", "down"): "'ACTION: up' cannot name an action",
        ("one", "--goal", "a\nb"): "printable text on one line",
        ("one", "--max-steps", "1"): "must be at least 2, got 1",
    }.items():
        assert said in error_of("init", *words), words
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "test_lights.py": "mine"
    }
