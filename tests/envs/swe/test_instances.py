"""Reading tasks in SWE-Gym's format, finding their repositories, and keeping pristine trees."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.swe.verdict.instances import load_instances, read_instance
from envs.swe.verdict.trees import building, commit_all, pristine_tree
from tests.envs.swe.tiny_repository import ROW, TASK, tiny_options

FULL_ROW = {
    **ROW,
    "base_commit": "0" * 40,
    "hints_text": "",
    "version": "1.0",
    "created_at": "2024-01-01",
}


def _write(path: Path, rows: list[dict]) -> Path:
    text = (
        json.dumps(rows)
        if path.suffix == ".json"
        else "".join(json.dumps(row) + "\n" for row in rows)
    )
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["tasks.json", "tasks.jsonl"])
def test_json_and_json_lines_give_the_same_instances(tmp_path: Path, name: str) -> None:
    instance = load_instances(_write(tmp_path / name, [FULL_ROW]))[TASK]
    assert instance.row() == {key: FULL_ROW[key] for key in instance.row()}
    assert len(instance.required) == 7


def test_parquet_gives_them_too_where_pyarrow_is_installed(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow enables reading parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([FULL_ROW]), path)
    assert load_instances(path)[TASK] == read_instance(FULL_ROW)


def test_test_lists_written_as_json_text_are_read() -> None:
    row = {**FULL_ROW, "FAIL_TO_PASS": json.dumps(ROW["FAIL_TO_PASS"]), "PASS_TO_PASS": "[]"}
    instance = read_instance(row)
    assert list(instance.fail_to_pass) == ROW["FAIL_TO_PASS"] and instance.pass_to_pass == ()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"FAIL_TO_PASS": []}, "nothing could be solved"),
        ({"FAIL_TO_PASS": "a, b"}, "not a JSON list"),
        ({"base_commit": 7}, "base_commit must be text"),
    ],
)
def test_a_bad_column_is_named_with_its_instance(change: dict, part: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){TASK}.*{part}"):
        read_instance({**FULL_ROW, **change})


def test_bad_files_are_refused_with_their_name(tmp_path: Path) -> None:
    cases: list[tuple[str, Callable[[Path], object], str]] = [
        ("twice.jsonl", lambda path: _write(path, [FULL_ROW, FULL_ROW]), "occurs twice"),
        ("torn.jsonl", lambda path: path.write_text('{"instance_id": '), "is damaged"),
        ("list.json", lambda path: path.write_text("[3]"), "is not an object"),
        ("tasks.csv", lambda path: path.write_text("a"), "must end in"),
    ]
    for name, make, part in cases:
        make(tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name}.*{part}"):
            load_instances(tmp_path / name)


def test_an_unknown_task_or_repository_is_refused_with_the_fix() -> None:
    options = tiny_options()
    with pytest.raises(ConfigError, match=f"did you mean {TASK}"):
        build_env_from("envs.swe", {"task": "shop_totals", "seed": 0}, options)
    with pytest.raises(ConfigError, match=r"tiny/shop: /path/to/clone"):
        build_env_from("envs.swe", {"task": TASK, "seed": 0}, {**options, "repos": {}})


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """A repository with a second commit that holds the solution; returns it and the first commit's
    id."""
    repository = tmp_path / "project"
    repository.mkdir()
    (repository / "code.py").write_text("broken\n")
    (repository / "kept").write_text("kept\n")
    (repository / ".gitattributes").write_text("kept export-ignore\n")
    (repository / "run").write_text("#!/bin/sh\n")
    (repository / "run").chmod(0o755)
    (repository / "link").symlink_to("code.py")
    first = commit_all(repository)
    (repository / "code.py").write_text("solution\n")
    argv = ["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qam", "solution"]
    subprocess.run(argv, cwd=repository, check=True)
    return repository, first


def test_the_pristine_tree_holds_the_commit_and_nothing_of_what_came_later(
    history, tmp_path: Path
) -> None:
    repository, first = history
    tree = pristine_tree(repository, first, tmp_path / "cache")
    assert (tree / "code.py").read_text() == "broken\n" and (tree / "kept").exists()
    assert (tree / "run").stat().st_mode & 0o100 and (tree / "link").is_symlink()
    log = subprocess.run(
        ["git", "log", "--all", "-p"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout
    assert log.count("commit ") == 1 and "solution" not in log
    assert (repository / "code.py").read_text() == "solution\n"


def test_a_pristine_tree_is_made_once_and_hooks_do_not_run(history, tmp_path: Path) -> None:
    repository, first = history
    for name in ("post-checkout", "post-index-change", "pre-commit"):
        hook = repository / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
        hook.chmod(0o755)
    tree = pristine_tree(repository, first, tmp_path / "cache")
    (tree / "mark").touch()
    assert (pristine_tree(repository, first, tmp_path / "cache") / "mark").exists()
    assert not (tmp_path / "hook-ran").exists()


def test_a_commit_or_folder_that_is_not_there_is_named(history, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="git read-tree"):
        pristine_tree(history[0], "f" * 40, tmp_path / "cache")
    with pytest.raises(ConfigError, match="is not a folder"):
        pristine_tree(tmp_path / "nowhere", "f" * 40, tmp_path / "cache")


def test_what_was_left_half_made_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(RuntimeError), building(target) as scratch:
        scratch.mkdir()
        (scratch / "half").touch()
        raise RuntimeError
    assert not target.exists()
    with building(target) as scratch:
        assert not scratch.exists()
        scratch.mkdir()
    with building(target) as scratch:
        assert scratch is None
