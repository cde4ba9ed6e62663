"""Environment modules are found by name or file, and what is wrong with one is said in a
sentence."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import envs.gymnasium_text
from envs.errors import ConfigError, MissingDependencyError
from envs.loading import build_env_from, load_attribute, load_env_module

TINY = """
from envs.base import BaseInteractionEnv, describe_task, make_observation

class Tiny(BaseInteractionEnv):
    def __init__(self, task, word): self.task, self.word = task, word
    def reset(self): return make_observation(self.word)
    def step(self, response_text): raise NotImplementedError

def build_env(sample, args):
    return Tiny(describe_task(sample)[0], args.env.get("word", "one"))
"""


def _write(path: Path, text: str, mtime: int = 1) -> str:
    path.write_text(text)
    os.utime(path, ns=(mtime, mtime))
    return str(path)


def test_a_module_name_and_a_file_both_lead_to_an_environment(tmp_path: Path) -> None:
    assert load_env_module("envs.gymnasium_text") is envs.gymnasium_text
    file = _write(tmp_path / "tiny.py", TINY)
    env = build_env_from(file, {"task": "t", "seed": 0}, {"word": "hello"})
    assert (env.reset()["obs_str"], env.task) == ("hello", "t")
    assert (
        build_env_from(file, {"task": "t", "seed": 0}, SimpleNamespace(env={})).reset()["obs_str"]
        == "one"
    )


def test_a_file_is_imported_once_and_again_after_an_edit(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.py", TINY)
    first = load_env_module(file)
    assert load_env_module(file) is first
    _write(tmp_path / "tiny.py", TINY.replace('"one"', '"two"'), mtime=2)
    assert build_env_from(file, {"task": "t", "seed": 0}).reset()["obs_str"] == "two"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("envs.gymnasium_txt", "did you mean envs.gymnasium_text"),
        ("", "must be a module name or a .py file"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_in_a_sentence(path: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_env_module(path)


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ("1 / 0", ConfigError, "fails on import: ZeroDivisionError"),
        (
            "import a_package_that_is_not_there",
            MissingDependencyError,
            "imports a_package_that_is_not_there",
        ),
    ],
)
def test_a_broken_file_is_reported_and_can_be_mended(
    tmp_path: Path, text: str, error: type[Exception], expected: str
) -> None:
    file = _write(tmp_path / "env.py", text)
    with pytest.raises(error, match=expected):
        load_env_module(file)
    _write(tmp_path / "env.py", TINY, mtime=2)
    assert callable(load_env_module(file).build_env)


def test_attributes_are_found_by_dot_colon_and_file(tmp_path: Path) -> None:
    assert load_attribute("os.path.join", "k") is os.path.join
    assert load_attribute("os.path:join", "k") is os.path.join
    assert load_attribute(_write(tmp_path / "mine.py", "x = 5") + ":x", "k") == 5
