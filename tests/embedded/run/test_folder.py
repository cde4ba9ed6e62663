"""The folder of a run: what is left when `--overwrite` is killed."""

import shutil
from pathlib import Path
from unittest import mock

import pytest

from embedded.run.folder import FILES, check_folder, claimed, delete
from slime_verlog import ConfigError


def test_overwrite_needs_nothing_to_overwrite(tmp_path: Path) -> None:
    with claimed(tmp_path / "new" / "run", {}, "overwrite"):
        assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["settings.json"]


@pytest.mark.parametrize("deleted", range(len(FILES)))
def test_what_a_killed_overwrite_leaves_can_be_deleted_and_not_continued(tmp_path: Path, deleted: int) -> None:
    for name in FILES:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("{}")
    steps = iter([None] * deleted)

    def killed(*_: object, **__: object) -> None:
        if next(steps, KeyboardInterrupt) is not None:
            raise KeyboardInterrupt

    unlink, rmtree = Path.unlink, shutil.rmtree
    with (
        mock.patch.object(Path, "unlink", lambda path, **more: (killed(), unlink(path, **more))),
        mock.patch.object(shutil, "rmtree", lambda path, **more: (killed(), rmtree(path, **more))),
        pytest.raises(KeyboardInterrupt),
    ):
        delete(tmp_path)
    if deleted:
        with pytest.raises(ConfigError, match="without settings.json, so it cannot be continued"):
            check_folder(tmp_path, "resume")
    with claimed(tmp_path, {}, "overwrite"):
        assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_run_that_failed_before_it_played_anything_does_not_hold_its_folder(tmp_path: Path) -> None:
    with claimed(tmp_path, {"keys": {"history": "full"}}, "refuse"):
        (tmp_path / "config.yaml").write_text("history: full")
        with pytest.raises(ConfigError, match="another process runs in"), claimed(tmp_path, {}, "refuse"):
            pass
    for if_held in ("refuse", "resume", "overwrite"):
        with claimed(tmp_path, {"if_held": if_held}, if_held):
            assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds an unfinished run, and nothing was changed"):
        check_folder(tmp_path, "refuse")
    with pytest.raises(ConfigError, match="holds a run with other settings"), claimed(tmp_path, {}, "resume"):
        pass
