"""`slime-verlog evaluate --repeats`: pass@k and pass^k as a count over all subsets gives them, and
pairs of seeds."""

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
    play(
        tmp_path,
        ["--repeats", "2"],
        ["--repeats", "4"],
        right=lambda number: number % 3 == 0 or number > 15,
    )
    assert "10 of 20 episodes are already in" in capsys.readouterr().err
    wins = by_seed(tmp_path)
    (row,) = rows_of(tmp_path)
    assert (
        [len(repeats) for repeats in wins] == [4] * 5
        and row["n"] == 20
        and row["success"]["n"] == 5
    )
    assert row["success"]["mean"] == pytest.approx(statistics.fmean(map(statistics.fmean, wins)))
    for k in (2, 3, 4):
        subsets = [list(itertools.combinations(repeats, k)) for repeats in wins]
        for name, counts in {f"pass@{k}": any, f"pass^{k}": all}.items():
            expected = [statistics.fmean(map(counts, chosen)) for chosen in subsets]
            assert row["metrics"][name]["mean"] == pytest.approx(statistics.fmean(expected))
            assert row["metrics"][name]["se"] == pytest.approx(statistics.stdev(expected) / 5**0.5)
    assert "Each seed was played 4 times" in (tmp_path / "out" / "table.md").read_text()


def test_repeats_are_one_pair_per_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One at a time, so that the same requests are answered rightly on a busy machine: not all
    # repeats of a seed.
    play(tmp_path / "a", ["--repeats", "2"], right=lambda number: number % 3 == 0, n_env=1)
    play(tmp_path / "b", [], right=lambda number: True)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["compare", str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out")])
    text = capsys.readouterr().out
    mean = statistics.fmean(map(statistics.fmean, by_seed(tmp_path / "a")))
    assert any(len(set(repeats)) == 2 for repeats in by_seed(tmp_path / "a"))
    assert end.value.code == 0 and re.search(rf"sums +5 +win rate +{mean:.3f} +1.000", text)
    assert (
        "seeds that B won more often: "
        f"{sum(not all(repeats) for repeats in by_seed(tmp_path / 'a'))}: " in text
    )
