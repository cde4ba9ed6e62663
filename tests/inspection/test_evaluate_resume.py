"""An evaluation that was cut, killed or interrupted goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inspection.evaluate.session import RunFolder
from inspection.records import read_episodes
from slime_verlog import ConfigError
from tests.fixtures.command import error_of
from tests.fixtures.played_episodes import invented_episode
from tests.inspection.test_evaluate import COUNTING, ROOT, evaluate, rows_of, write_config


def test_more_episodes_are_added_to_those_that_were_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*write_config(tmp_path, tasks=["count"]), "--player", "random"]
    assert evaluate(*given) == 0
    first = list(read_episodes(tmp_path / "out"))
    assert evaluate(*given, "--episodes", "6", "--set", "n_env=2") == 0
    assert "4 of 6 episodes are already in" in capsys.readouterr().err
    assert list(read_episodes(tmp_path / "out"))[:4] == first and rows_of(tmp_path)[0]["n"] == 6
    assert evaluate(*given, "--episodes", "6", "--sweep", "memory.n=3") == 0
    assert [row["setting"] for row in rows_of(tmp_path)] == ["memory.n=3"]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "with_expert.py"
    module.write_text(
        f"from {COUNTING} import build_env\n\ndef expert_action(env):\n    return 'left'\n"
    )
    given = write_config(tmp_path, rollout_interaction_env_path=str(module))
    given += ["--player", "random"]
    assert evaluate(*given) == 0
    for extra, changed in {
        "--player expert": "player.name is 'random' there and 'expert' here",
        "--set env.slow_s=0.1": "config.env.slow_s is None there and 0.1 here",
    }.items():
        words = f"{tmp_path}/out holds a run with other settings: {changed}; choose another --out"
        assert words in error_of("evaluate", *given, *extra.split())


def test_a_refused_folder_is_free_at_once(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "random", {"a": 1}, {}) as folder:
        folder.append(invented_episode(1), "-")
    with pytest.raises(ConfigError, match="other settings") as kept:
        RunFolder(tmp_path, "random", {"a": 2}, {})
    assert kept.traceback, "it holds on to the folder that was refused"
    with RunFolder(tmp_path, "random", {"a": 1}, {}):
        pass


def test_results_of_another_version_of_the_environment_are_not_printed_as_if_they_were_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = tmp_path / "game.py"
    game.write_text(f"from {COUNTING} import build_env\nimport rules\n")
    (tmp_path / "rules.py").write_text("LENGTH = 3\n")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = write_config(tmp_path, rollout_interaction_env_path=str(game))
    given += ["--player", "random"]
    assert evaluate(*given) == 0
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert evaluate(*given, "--episodes", "5") == 0, "the environment is the same"
    (tmp_path / "rules.py").write_text("LENGTH = 4\n")
    other = "holds episodes of another version of the environment: rules.py changed since; "
    assert f"{tmp_path}/out {other}give another --out" in error_of("evaluate", *given)
    assert evaluate(*given, "--out", str(tmp_path / "new")) == 0


def test_another_version_in_a_folder_with_another_name_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--player", "random", "--out", str(tmp_path / "out"))
    for version, line in (("first", ""), ("copy", ""), ("second", "LENGTH = 4\n")):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "game.py").write_text(f"from {COUNTING} import build_env\n{line}")
        monkeypatch.chdir(folder)
        given = write_config(folder, rollout_interaction_env_path="game.py")[:1]
        if version != "second":
            assert evaluate(*given, *out) == 0
    assert "another version of the environment: game.py changed" in error_of(
        "evaluate", *given, *out
    )


@pytest.mark.parametrize("key", ["stop", "seed", "setting", "metrics", "valid_action_ratio"])
def test_a_record_that_lacks_a_key_is_refused_with_its_line(tmp_path: Path, key: str) -> None:
    given = [*write_config(tmp_path), "--player", "random"]
    assert evaluate(*given) == 0
    file = tmp_path / "out" / "episodes.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    del first[key]
    before = "".join(json.dumps(episode) + "\n" for episode in (first, *others))
    file.write_text(before)
    assert f"episodes.jsonl, line 1, has no key '{key}'" in error_of("evaluate", *given)
    assert file.read_text() == before


def test_a_damaged_description_of_a_run_is_refused(tmp_path: Path) -> None:
    given = [*write_config(tmp_path), "--player", "random"]
    assert evaluate(*given) == 0
    for damaged in ("[]", '{"sources": []}'):
        (tmp_path / "out" / "run.json").write_text(damaged)
        assert "run.json cannot be read: it does not describe a run" in error_of("evaluate", *given)


def test_a_line_that_was_cut_is_dropped_and_its_episode_played_again(tmp_path: Path) -> None:
    given = [*write_config(tmp_path, tasks=["count"]), "--player", "random"]
    assert evaluate(*given) == 0
    file = tmp_path / "out" / "episodes.jsonl"
    table = (tmp_path / "out" / "table.json").read_text()
    whole = sorted(file.read_text().splitlines())
    file.write_bytes(file.read_bytes()[:-50])
    assert evaluate(*given) == 0
    assert sorted(file.read_text().splitlines()) == whole
    assert (tmp_path / "out" / "table.json").read_text() == table


def start(given: list[str], episodes: Path, lines: int) -> subprocess.Popen[str]:
    """The command in another process, once it has played `lines` episodes."""
    command = [sys.executable, "-m", "inspection", "evaluate", *given]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not episodes.exists() or episodes.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return process


def slow_run(folder: Path, episodes: int = 12) -> list[str]:
    keys = {
        "env": {"slow_s": 0.05},
        "env_backend": "process",
        "env_workers": 2,
        "eval": {"episodes": episodes},
    }
    return [*write_config(folder, tasks=["count"], **keys), "--player", "random"]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_table_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    given = slow_run(tmp_path)
    out = tmp_path / "out"
    process = start(given, out / "episodes.jsonl", 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert evaluate(*given) == 0
    keys = [(episode["task_name"], episode["seed"]) for episode in read_episodes(out)]
    assert len(keys) == len(set(keys)) == 12
    assert evaluate(*given, "--out", str(tmp_path / "whole")) == 0
    assert (out / "table.json").read_text() == (tmp_path / "whole" / "table.json").read_text()


def test_ctrl_c_ends_in_a_sentence_and_keeps_what_was_played(tmp_path: Path) -> None:
    given = slow_run(tmp_path, 2000)
    out = tmp_path / "out"
    process = start(given, out / "episodes.jsonl", 2)
    assert "another process runs in" in error_of("evaluate", *given)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    kept = len(list(read_episodes(out)))
    assert (
        f"interrupted: {kept} of 2000 episodes are in {out}, and the same command plays the others"
        in errors
    )
    assert kept >= 2 and f"Incomplete: {kept} of 2000 episodes were played" in shown
