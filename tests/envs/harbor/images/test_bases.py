"""Changes that a build step made are moved into the image's files."""

from pathlib import Path

from envs.harbor.images.bases import apply_changes
from tests.envs.users import as_a_user


def test_a_folder_that_a_step_made_read_only_is_moved_without_root(tmp_path: Path) -> None:
    (tmp_path / "changes" / "module" / "inner").mkdir(parents=True)
    (tmp_path / "changes" / "module" / "inner" / "file").write_text("1")
    (tmp_path / "tree").mkdir()
    for path in (tmp_path / "changes" / "module" / "inner", tmp_path / "changes" / "module"):
        path.chmod(0o555)
    as_a_user(tmp_path, lambda: apply_changes(Path("changes"), Path("tree")))
    assert (tmp_path / "tree" / "module" / "inner" / "file").read_text() == "1"
    assert (tmp_path / "tree" / "module").stat().st_mode & 0o777 == 0o755
