"""Changes that a build step made are moved into the image's files."""

import os
from pathlib import Path

from envs.harbor.images.bases import apply_changes

SOMEONE = 12345


def test_a_folder_that_a_step_made_read_only_is_moved_without_root(tmp_path: Path) -> None:
    (tmp_path / "changes" / "module" / "inner").mkdir(parents=True)
    (tmp_path / "changes" / "module" / "inner" / "file").write_text("1")
    (tmp_path / "tree").mkdir()
    for path in (tmp_path / "changes" / "module" / "inner", tmp_path / "changes" / "module"):
        path.chmod(0o555)
    if os.geteuid() == 0:  # root may write everywhere
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, SOMEONE, SOMEONE)
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.chdir(tmp_path)
            if os.geteuid() == 0:
                os.setuid(SOMEONE)
            apply_changes(Path("changes"), Path("tree"))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "tree" / "module" / "inner" / "file").read_text() == "1"
    assert (tmp_path / "tree" / "module").stat().st_mode & 0o777 == 0o755
