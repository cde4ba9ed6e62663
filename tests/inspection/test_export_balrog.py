"""`slime-verlog export --format balrog`: the folder that BALROG's leaderboard takes."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspection.records import append_episode
from tests.fixtures.played_episodes import record_episode
from tests.inspection.test_export import export

BALROG = {"preset": "balrog"}
GOTO, MAKE = "env/goto_win", "env/make_win"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes of two BabaIsAI tasks; the expert wins and random play does not."""
    folder = tmp_path_factory.mktemp("run")
    for task, count in ((GOTO, 3), (MAKE, 4)):
        for seed in range(count):
            episode = record_episode("envs.babaisai", task, seed, options=BALROG, skill=(seed % 2) * 1.0, max_turns=300)
            append_episode(folder / "episodes.jsonl", episode, "my-model")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_folder_has_balrogs_layout_and_arithmetic(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "submission"
    assert export(run, "--format", "balrog", "--out", out) is None
    said = capsys.readouterr().out
    assert "missing: babyai, textworld, crafter, nle, minihack" in said
    assert "babaisai: 2 of 40 tasks" in said
    played = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    logs = sorted(out.glob("babaisai/env/*/env/*.json"))
    assert [path.name for path in logs] == [
        *(f"goto_win_run_0{n}.json" for n in range(3)),
        *(f"make_win_run_0{n}.json" for n in range(4)),
    ]
    for path, episode in zip(logs, played, strict=True):
        log = read(path)
        assert log["progression"] == episode["progression"]
        assert log["task"] == episode["task"]
        assert sum(log["action_frequency"].values()) == log["num_steps"] == episode["turns"]
        assert len(log["failed_candidates"]) == sum(not turn["valid"] for turn in episode["story"])
        with open(path.with_suffix(".csv"), encoding="utf-8", newline="") as file:
            steps = list(csv.DictReader(file, escapechar="˘"))
        assert [float(step["Reward"]) for step in steps] == [turn["reward"] for turn in episode["story"]]
        assert steps[-1]["Done"] == "True"
        assert "Current Observation" in steps[0]["Observation"]
    won = [episode["progression"] for episode in played]
    mean = sum(won) / len(won)
    error = (sum((x - mean) ** 2 for x in won) / len(won)) ** 0.5 / len(won) ** 0.5
    assert 0 < mean < 1
    summary = read(out / "summary.json")
    assert summary["environments"]["babaisai"]["progression_percentage"] == pytest.approx(100 * mean)
    assert summary["standard_error"] == pytest.approx(100 * error)
    about = yaml.safe_load((out / "metadata.yaml").read_text(encoding="utf-8"))
    assert (about["name"], about["oss"], about["verified"]) == ("my-model", False, False)
    assert "missing: babyai" in (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif("BALROG_EXPERIMENTS" not in os.environ, reason="needs BALROG_EXPERIMENTS, a checkout of its site")
def test_the_leaderboards_own_script_finds_the_same_summary(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "submissions" / "LLM" / "20260102_my_model"
    assert export(run, "--format", "balrog", "--out", out) is None
    ours = read(out / "summary.json")
    script = shutil.copy(Path(os.environ["BALROG_EXPERIMENTS"]) / "submit.py", tmp_path)
    subprocess.run([sys.executable, script, str(out)], cwd=tmp_path, check=True, capture_output=True)
    theirs = read(out / "summary.json")
    assert theirs["environments"]["babaisai"] == pytest.approx(ours["environments"]["babaisai"])
    assert {key: theirs[key] for key in theirs if key != "environments"} == {
        **{key: ours[key] for key in ("client", "agent", "total_input_tokens", "total_output_tokens")},
        **{key: pytest.approx(ours[key]) for key in ("average_progress", "standard_error")},
    }
    [entry] = read(tmp_path / "template" / "data.json")["leaderboards"][0]["results"]
    assert entry["name"] == "my-model"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {}}, "was not played as BALROG does"),
        ({"options": {**BALROG, "max_steps": 9}}, "no env.max_steps"),
        ({"stop": "max_turns"}, "before the game's own limit"),
        ({"env_path": "envs.sokoban"}, "is not one of BALROG's tasks"),
        ({"env_path": "envs.babyai", "task": "GoToObj"}, "is not one of BALROG's tasks"),
        ({"env_path": "envs.textworld", "task": "coin_collector"}, "env.games_path"),
        ({"env_path": "envs.balrog", "task": "chess"}, "is not one of BALROG's tasks"),
        ({"env_path": "envs.balrog", "task": "nle//etc/x"}, "is not one of BALROG's tasks"),
        ({"task": "../../../x"}, "is not one of BALROG's tasks"),
        ({"seed": 1}, "is there twice"),
        ({"player": "another"}, "of one player"),
    ],
)
def test_what_the_leaderboard_could_not_compare_is_refused_and_nothing_written(
    run: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    lines[-1] = json.dumps({**json.loads(lines[-1]), **change}) + "\n"
    (tmp_path / "episodes.jsonl").write_text("".join(lines), encoding="utf-8")
    assert named in str(export(tmp_path, "--format", "balrog", "--out", tmp_path / "submission"))
    assert [path.name for path in tmp_path.iterdir()] == ["episodes.jsonl"]


def test_an_existing_folder_is_kept(run: Path, tmp_path: Path) -> None:
    assert "exists already" in str(export(run, "--format", "balrog", "--out", tmp_path))


@pytest.mark.parametrize("flag", [("--successful",), ("--min-return", 0.5), ("--overwrite",), ("--valid-only",)])
def test_chosen_episodes_are_refused(run: Path, tmp_path: Path, flag: tuple[object, ...]) -> None:
    assert str(flag[0]) in str(export(run, "--format", "balrog", "--out", tmp_path / "submission", *flag))
    assert not list(tmp_path.iterdir())
