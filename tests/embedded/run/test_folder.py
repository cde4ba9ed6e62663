"""The folder of a run: who may write into it."""

from pathlib import Path

import pytest

from embedded.run.folder import check_folder, claimed
from slime_verlog import ConfigError


def test_a_run_that_failed_before_it_played_anything_does_not_hold_its_folder(
    tmp_path: Path,
) -> None:
    with claimed(tmp_path, {"keys": {"history": "full"}}, resume=False):
        (tmp_path / "config.yaml").write_text("history: full")
        with (
            pytest.raises(ConfigError, match="another process runs in"),
            claimed(tmp_path, {}, resume=False),
        ):
            pass
    for resume in (False, True):
        with claimed(tmp_path, {"resume": resume}, resume):
            pass
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds an unfinished run, and nothing was changed"):
        check_folder(tmp_path, resume=False)
    with pytest.raises(ConfigError, match="holds a run with other settings"), claimed(tmp_path, {}):
        pass
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ConfigError, match="metrics.jsonl, but not of a training run"):
        check_folder(tmp_path, resume=True)
