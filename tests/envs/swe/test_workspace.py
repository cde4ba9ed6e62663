"""The folders of a process and its episodes: closing does not wait for the disk, and nothing stays
behind."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.swe.sandbox import workspace as folders
from envs.swe.sandbox.workspace import ProcessFolder, Workspace, remove_tree
from tests.envs.users import as_a_user, open_way

FILL = """
import os, sys
def fill(folder):
    os.chdir(folder)
    os.mkdir("closed")
    for i in range(300):
        open(f"closed/{i}", "w").close()
    os.mkfifo("closed/pipe")
    os.symlink("/", "closed/root")
    os.chmod("closed", 0)
    for _ in range(300):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    os.chmod(".", 0)
    os.chdir("/")
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary files go to."""
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def fill(folder: Path) -> None:
    """Long paths, closed folders, many files, a pipe, and a link that leads out."""
    subprocess.run([sys.executable, "-c", f"{FILL}\nfill({str(folder)!r})"], check=True)


def test_a_tree_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("safe")
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    fill(tree)
    remove_tree(tree)
    remove_tree(tree)
    assert os.listdir(tmp_path) == ["outside"] and (outside / "file").read_text() == "safe"


def test_a_closed_folder_is_opened_and_the_files_in_it_keep_their_rights(tmp_path: Path) -> None:
    """A file may have another name outside of the tree; root needs no rights, so `rm` is made to
    fail once."""
    tree, kept, tools = tmp_path / "tree", tmp_path / "kept", tmp_path / "tools"
    tree.mkdir()
    tools.mkdir()
    kept.write_text("read-only")
    kept.chmod(0o444)
    os.link(kept, tree / "file")
    failed = tools / "failed"
    (tools / "rm").write_text(
        f'#!/bin/sh\n[ -e {failed} ] && exec /bin/rm "$@"\ntouch {failed}; exit 1\n'
    )
    (tools / "rm").chmod(0o755)
    tree.chmod(0o555)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "PROGRAMS", f"{tools}:{folders.PROGRAMS}")
        remove_tree(tree)
    assert not tree.exists() and kept.stat().st_mode & 0o777 == 0o444


def test_close_takes_a_tree_away_without_waiting_for_its_removal(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal waits for a file. When many removals are under way, `close` waits for its own."""
    owner, go = ProcessFolder(), temporary / "go"
    removal = f'case "$1" in *first*) until [ -e {go} ]; do sleep 0.05; done;; esac; rm -rf -- "$1"'
    monkeypatch.setattr(folders, "_REMOVE", removal)
    monkeypatch.setattr(folders, "process_folder", lambda: owner)
    monkeypatch.setattr(
        folders.uuid, "uuid4", lambda: SimpleNamespace(hex=f"first{len(os.listdir(owner.path))}")
    )
    for number in range(folders._MAX_REMOVING):
        workspace = Workspace(lambda tree: tree.mkdir())
        workspace.close()
        assert not workspace.folder.exists() and len(os.listdir(owner.path)) == number + 2
    monkeypatch.setattr(folders.uuid, "uuid4", lambda: SimpleNamespace(hex="last"))
    owner.discard(owner.make())
    assert len(os.listdir(owner.path)) == folders._MAX_REMOVING + 1
    go.touch()
    while len(os.listdir(owner.path)) > 1:
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["", "os.fork() or os._exit(0); os.wait()", "raise SystemExit(3)"])
def test_nothing_stays_behind_when_the_process_ends_during_the_removal(
    tmp_path: Path, end: str
) -> None:
    code = f"""{FILL}
from envs.swe.sandbox.workspace import Workspace
trees = [Workspace(lambda tree: (tree.mkdir(), fill(tree))) for _ in range(2)]
for tree in trees:
    tree.close()
kept = Workspace(lambda tree: (tree.mkdir(), fill(tree)))
{end}
"""
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == (3 if "SystemExit" in end else 0)
    assert not os.listdir(tmp_path)


def test_a_tree_is_removed_by_a_user_without_rights_however_deep_its_closed_folders_are(
    tmp_path: Path,
) -> None:
    open_way(tmp_path)

    def make_and_remove() -> None:
        for _ in range(300):
            os.mkdir("d" * 50)
            os.chdir("d" * 50)
        os.mkdir("closed")
        Path("closed/file").touch()
        os.chmod("closed", 0)
        os.chdir("/")
        remove_tree(tmp_path / ("d" * 50))

    as_a_user(tmp_path, make_and_remove)
    assert not list(tmp_path.iterdir())
