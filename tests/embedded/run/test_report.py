"""What a resumed run keeps of its earlier sessions."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("tensorboard", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.run.report import RunReport


def test_the_wall_time_of_a_resumed_run_counts_all_its_sessions(tmp_path: Path) -> None:
    report = RunReport(tmp_path, {}, tmp_path)
    report.began -= 100.0
    report.update(0, {"train/actor_trains": 1.0})
    report.began -= 20.0
    report.update(1, {"train/actor_trains": 1.0})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text(json.dumps({"rollout_id": 0}))
    resumed = RunReport(tmp_path, {}, tmp_path)
    assert [row["update"] for row in resumed.history] == [1]
    assert 120.0 <= resumed.write()["wall_time_s"] < 130.0, "the update that was dropped took its time, too"
