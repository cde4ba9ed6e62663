"""Which files an environment's fingerprints cover."""

from pathlib import Path

import pytest

from inspection.evaluate.fingerprint import fingerprints


def names(*env_paths: str, **config: object) -> set[str]:
    return set(fingerprints(env_paths, config))


def test_a_package_counts_with_its_templates_and_without_the_interface() -> None:
    found = names("envs.babyai")
    assert {"__init__.py", "levels.py", "prompt.j2"} <= found
    assert not any(name.startswith("..") for name in found)


def test_a_file_counts_with_what_it_imports_and_names(tmp_path: Path) -> None:
    game = tmp_path / "games"
    (game / "parts").mkdir(parents=True)
    (game / "templates").mkdir()
    (game / "game.py").write_text(
        "import json\nfrom parts import walls\nimport rules\nNAME = 'prompt.j2'\n"
    )
    (game / "rules.py").write_text("from more import LENGTH\n")
    (game / "other.py").write_text("")
    (game / "more.py").write_text("LENGTH = 3\n")
    (game / "parts" / "__init__.py").write_text("")
    (game / "parts" / "walls.py").write_text("from . import doors\n")
    (game / "parts" / "doors.py").write_text("")
    (game / "templates" / "prompt.j2").write_text("Go.")
    own = {"game.py", "rules.py", "more.py", "templates/prompt.j2"}
    assert names(str(game / "game.py")) == {
        *own,
        "parts/__init__.py",
        "parts/walls.py",
        "parts/doors.py",
    }


def test_files_that_the_configuration_names_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("tools.py", "reward.py", "data.jsonl")
    for name in files:
        (tmp_path / name).write_text("x = 1\n")
    settings = {
        "tools": ["tools.py:add"],
        "grader": "reward.score",
        "data": "data.jsonl",
        "prompt": "Add. " * 2000,
    }
    assert names(env=settings, tasks=["default"]) == set(files)
