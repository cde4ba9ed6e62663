"""`slime-verlog evaluate --repeats`: pass@k and pass^k as a count over all subsets gives them, and pairs of seeds."""

import itertools
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from inspection.command import main
from inspection.records import read_episodes
from tests.fixtures.chat_server import KEY, ChatServer
from tests.inspection.test_evaluate import evaluate, rows_of, write_config

pytest.importorskip("jsonschema", reason="questions need pip install 'slime-verlog[tools]'")
GAME = {"data": [{"question": "What is 2 + 3?", "answer": "5"}], "grader": "exact"}
KEYS = {"rollout_interaction_env_path": "envs.tools", "tasks": ["sums"], "n_env": 2, "env": GAME}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def play(folder: Path, *calls: list[str], right: Any, n_env: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    with ChatServer(lambda body, number: "5" if right(number) else "6") as server:
        for words in calls:
            given = write_config(folder, **{**KEYS, "n_env": n_env}, eval={"episodes": 5})
            assert evaluate(*given, "--player", server.url, "--model", "m", *words) == 0


def by_seed(folder: Path) -> list[list[bool]]:
    found: dict[int, list[bool]] = {}
    for episode in read_episodes(folder / "out"):
        found.setdefault(episode["seed"], []).append(bool(episode["success"]))
    return list(found.values())


def test_pass_at_k_is_that_of_all_subsets_and_more_repeats_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, ["--repeats", "2"], ["--repeats", "4"], right=lambda number: number % 3 == 0 or number > 15)
    assert "10 of 20 episodes are already in" in capsys.readouterr().err
    wins, (row,) = by_seed(tmp_path), rows_of(tmp_path)
    assert [len(repeats) for repeats in wins] == [4] * 5 and row["n"] == 20 and row["success"]["n"] == 5
    assert row["success"]["mean"] == pytest.approx(statistics.fmean(map(statistics.fmean, wins)))
    for k in (2, 3, 4):
        subsets = [list(itertools.combinations(repeats, k)) for repeats in wins]
        for name, counts in {f"pass@{k}": any, f"pass^{k}": all}.items():
            expected = [statistics.fmean(map(counts, chosen)) for chosen in subsets]
            assert row["metrics"][name]["mean"] == pytest.approx(statistics.fmean(expected))
            assert row["metrics"][name]["se"] == pytest.approx(statistics.stdev(expected) / 5**0.5)
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Each seed was played 4 times" in text and "Standard deviation of wins between seeds" in text


def test_settings_that_differ_are_no_spread_between_seeds(tmp_path: Path) -> None:
    words = ["--repeats", "2", "--sweep", "env.format_penalty=0.1,0.2"]
    play(tmp_path, words, right=lambda number: number < 10, n_env=1)
    assert [row["success"]["mean"] for row in rows_of(tmp_path)] == [1.0, 0.0]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Standard deviation of wins between seeds 0.00, between repeats of a seed 0.00." in text


def test_repeats_are_one_pair_per_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One at a time, so that the same requests are answered rightly on a busy machine: not all repeats of a seed.
    play(tmp_path / "a", ["--repeats", "2"], right=lambda number: number % 3 == 0, n_env=1)
    play(tmp_path / "b", [], right=lambda number: True)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["compare", str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out")])
    text, mean = capsys.readouterr().out, statistics.fmean(map(statistics.fmean, by_seed(tmp_path / "a")))
    assert any(len(set(repeats)) == 2 for repeats in by_seed(tmp_path / "a"))
    assert end.value.code == 0 and re.search(rf"sums +5 +win rate +{mean:.3f} +1.000", text)
    assert f"seeds that B won more often: {sum(not all(repeats) for repeats in by_seed(tmp_path / 'a'))}: " in text


def test_baselines_stand_in_the_same_table_and_are_played_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    keys = {"rollout_interaction_env_path": "envs.babyai", "tasks": ["goto"], "eval": {"episodes": 3}, "max_turns": 20}
    with ChatServer(lambda *_: "ACTION: turn left") as server:
        for _ in range(2):
            given = [*write_config(tmp_path, **keys), "--player", server.url, "--model", "m", "--baselines"]
            assert evaluate(*given) == 0
            assert [row["player"] for row in rows_of(tmp_path)] == ["m", "random", "expert"]
    out, err = capsys.readouterr()
    assert rows_of(tmp_path)[2]["success"]["mean"] == 1.0 and "expert" in out
    assert err.count("3 of 3 episodes are already in") == 3


def test_an_environment_without_an_expert_has_random_play_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, ["--baselines"], right=lambda number: True)
    assert [row["player"] for row in rows_of(tmp_path)] == ["m", "random"]
    assert "has no function expert_action" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "2"], "--repeats 2: the player random plays a seed the same way each time"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--baselines"], "--baselines adds to a model's table what random reaches: give a model as --player"),
        (["--price", "-1", "2"], "--price takes two numbers that are at least 0"),
        (["--price", "nan", "2"], "--price takes two numbers that are at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        evaluate(*write_config(tmp_path), "--player", "random", *words)
