"""`slime-verlog compare`: pairs by setting, task and seed, paired bootstrap intervals, and what cannot be paired."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspection.command import main
from inspection.evaluate.pairs import interval


def write(path: Path, won: list[bool], task: str = "goto", setting: str = "-", **keys: Any) -> None:
    """Add episodes from seed 0 on."""
    path.mkdir(exist_ok=True)
    with open(path / "episodes.jsonl", "a") as file:
        for seed, success in enumerate(won):
            numbers = {"success": success, "return": float(success), "progression": float(success), "turns": 10 - seed}
            names = {"env_path": "envs.babyai", "task": task, "task_name": task, "stop": "terminated"}
            episode = {"setting": setting, "player": path.name, "seed": seed, **names, **numbers, **keys}
            file.write(json.dumps({**episode, "messages": [], "story": []}) + "\n")


def compare(*arguments: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, arguments)])
    assert ended.value.code == 0, ended.value.code
    return ""


def line(text: str, start: str) -> list[str]:
    return re.split(r"\s{2,}", next(row for row in text.splitlines() if row.startswith(start)))


def test_pairs_are_compared_per_task_and_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", [False] * 30 + [True] * 10)
    write(tmp_path / "b", [True] * 24 + [False] * 6 + [False] * 2 + [True] * 8)
    write(tmp_path / "a", [True] * 5, "open")
    write(tmp_path / "b", [True] * 5, "open")
    compare(tmp_path / "a", tmp_path / "b")
    text = capsys.readouterr().out
    task, pairs, _, a, b, difference, between = line(text, "goto")
    low, high = map(float, re.findall(r"[+-][\d.]+", between))
    assert (task, pairs, a, b, difference) == ("goto", "40", "0.250", "0.800", "+0.550")
    assert 0.25 < low < 0.55 < high < 0.75 and between.endswith("*")
    assert line(text, "open")[-1] == "the same in every pair"
    assert line(text, "all")[1:6] == ["45", "win rate", "0.333", "0.822", "+0.489"]
    assert "only A won 2: goto 30, goto 31\n" in text
    assert "only B won 24: goto 0, goto 1, " in text and "goto 19, and 4 more" in text
    compare(tmp_path / "a", tmp_path / "b")
    assert capsys.readouterr().out == text, "the bootstrap has a fixed seed"


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("pairs", "has_interval"), [(3, False), (4, True)])
def test_an_interval_needs_more_pairs_than_its_two_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks: int, pairs: int, has_interval: bool
) -> None:
    for task in range(tasks):
        write(tmp_path / "a", [False] * pairs, f"task{task}")
        write(tmp_path / "b", [k < pairs - 1 or pairs == 1 for k in range(pairs)], f"task{task}")
    compare(tmp_path / "a", tmp_path / "b")
    text = capsys.readouterr().out
    for start in ("task0", *(["all"] if tasks > 1 else [])):
        assert line(text, start)[-1].startswith("[") == has_interval
    assert "With fewer than 4 pairs of a task there is no interval (–)." in text


def test_the_settings_of_a_seed_are_one_pair_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("n=1", "n=2", "n=4"):
        write(tmp_path / "a", [False] * 10 + [True] * 5, setting=setting)
        write(tmp_path / "b", [True] * 15, setting=setting)
    compare(tmp_path / "a", tmp_path / "b")
    lines = capsys.readouterr().out.splitlines()
    [of_one] = [row for row in lines if row.startswith("n=1")]
    [of_all] = [row for row in lines if row.startswith("all")]
    assert of_all.split()[2:] == of_one.split()[2:], "three copies of the same pairs tell no more than one"


def test_failed_and_unpaired_episodes_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", [True] * 4)
    write(tmp_path / "a", [False], "lost", stop="failed")
    write(tmp_path / "b", [False] * 6)
    write(tmp_path / "b", [True], "lost")
    compare(tmp_path / "a", tmp_path / "b" / "episodes.jsonl")
    text = capsys.readouterr().out
    assert line(text, "goto")[:6] == ["goto", "4", "win rate", "1.000", "0.000", "-1.000"]
    assert "2 episodes that only one of the two played are left out." in text
    assert "1 pairs with a failed episode are left out." in text


def test_what_cannot_be_paired_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "a", [True] * 2)
    write(tmp_path / "twice", [True] * 2)
    write(tmp_path / "twice", [True])
    write(tmp_path / "other", [True], "open")
    write(tmp_path / "game", [True], env_path="envs.crafter")
    write(tmp_path / "lost", [True], stop="failed")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "episodes.jsonl").write_text('{"messages": [], "story": []}\n')
    for other, words in {
        "twice": "twice has two episodes of goto 0, so they cannot be paired",
        "other": "have no episode in common .setting, task, seed.: goto 0 and open 0",
        "game": "goto 0 is not the same game in A and B: env_path is 'envs.babyai' and 'envs.crafter'",
        "lost": "all 1 pairs of .* have a failed episode",
        "none": "none cannot be read",
        "old": "old, episode 1, has no key 'setting', so it cannot be compared",
    }.items():
        with pytest.raises(SystemExit, match=f"error: .*{words}"):
            main(["compare", str(tmp_path / "a"), str(tmp_path / other)])
    with pytest.raises(SystemExit, match="has no episodes of setting 'x'; it has -"):
        main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--settings", "x", "-"])


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        low, high = interval([draw.normal(0.3, 1.0, 40), draw.normal(0.3, 1.0, 40)])
        covered += low <= 0.3 <= high
    assert covered >= 51
