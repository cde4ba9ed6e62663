"""What a resumed run keeps of its earlier sessions."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.run.report import RunReport
from tests.embedded.run.test_alarms import scored


def test_the_wall_time_of_a_resumed_run_counts_all_its_sessions(tmp_path: Path) -> None:
    report = RunReport(tmp_path, {}, tmp_path)
    report.began -= 100.0
    report.update(0, {"train/actor_trains": 1.0})
    report.began -= 20.0
    report.update(1, {"train/actor_trains": 1.0})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text(json.dumps({"rollout_id": 0}))
    (tmp_path / "episodes.jsonl").write_bytes(
        '{"setting": "after 1 updates", "x": "ü"}'.encode()[:-3]
    )
    (tmp_path / "summary.json").write_text('{"interrupted": true}')
    resumed = RunReport(tmp_path, {}, tmp_path)
    assert not (tmp_path / "summary.json").exists(), "the run goes on"
    assert not (tmp_path / "episodes.jsonl").exists(), (
        "a line that was cut, here within a character"
    )
    assert [row["update"] for row in resumed.history] == [1]
    assert 120.0 <= resumed.write()["wall_time_s"] < 130.0, (
        "the update that was dropped took its time, too"
    )


def test_the_summary_names_the_best_policy_by_the_verdict_of_each_evaluation(
    tmp_path: Path,
) -> None:
    report = RunReport(tmp_path, {"lengths": {}}, tmp_path)
    for updates, (wins, total) in {0: (0, 0.1), 20: (1, 0.1), 40: (0, 0.5)}.items():
        facts = {"turns": 3, "valid_action_ratio": 1.0, "fault": None}
        report.evaluations[updates] = [facts | episode for episode in scored(wins, 32, total)]
    summary = report.write()
    assert summary["best_update"] == 40, "a win by chance does not outweigh the return"
    verdict = summary["verdict"]
    assert (verdict["verdict"], verdict["measure"]) == ("improved", "return")
    assert "win rate 0.000" not in verdict["sentence"].partition(";")[0]
