"""`slime-verlog compare`: pairs by setting, task and seed, paired bootstrap intervals, and what
cannot be paired."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspection.evaluate.pairs import interval
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.played_episodes import invented_episode, write_run


def write(path: Path, won: list[bool], task: str = "goto", setting: str = "-", **keys: Any) -> None:
    """Add episodes from seed 0 on."""
    for seed, success in enumerate(won):
        facts = {
            "success": success,
            "return": float(success),
            "progression": float(success),
            "task_name": task,
        }
        facts |= {"env_path": "envs.babyai", "task": task}
        write_run(path, [invented_episode(seed, 1, **{**facts, **keys})], path.name, setting)


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints about the runs `a` and `b`."""

    def print_comparison(b: str = "b") -> str:
        assert slime_verlog("compare", tmp_path / "a", tmp_path / b) == 0
        return capsys.readouterr().out

    return print_comparison


def line(text: str, start: str) -> list[str]:
    return re.split(r"\s{2,}", next(row for row in text.splitlines() if row.startswith(start)))


def test_pairs_are_compared_per_task_and_together(
    tmp_path: Path, compare: Callable[..., str]
) -> None:
    write(tmp_path / "a", [False] * 30 + [True] * 10)
    write(tmp_path / "b", [True] * 24 + [False] * 6 + [False] * 2 + [True] * 8)
    write(tmp_path / "a", [True] * 5, "open")
    write(tmp_path / "b", [True] * 5, "open")
    text = compare()
    task, pairs, _, a, b, difference, between = line(text, "goto")
    low, high = map(float, re.findall(r"[+-][\d.]+", between))
    assert (task, pairs, a, b, difference) == ("goto", "40", "0.250", "0.800", "+0.550")
    assert 0.25 < low < 0.55 < high < 0.75 and between.endswith("*")
    assert line(text, "open")[-1] == "the same in every pair"
    assert line(text, "all")[1:6] == ["45", "win rate", "0.333", "0.822", "+0.489"]
    assert "only A won 2: goto 30, goto 31\n" in text
    assert "only B won 24: goto 0, goto 1, " in text and "goto 19, and 4 more" in text
    assert compare() == text, "the bootstrap has a fixed seed"


@pytest.mark.parametrize(("pairs", "has_interval"), [(3, False), (4, True)])
def test_an_interval_needs_more_pairs_than_its_two_ends(
    tmp_path: Path, compare: Callable[..., str], pairs: int, has_interval: bool
) -> None:
    for task in ("one", "two"):
        write(tmp_path / "a", [False] * pairs, task)
        write(tmp_path / "b", [True] * (pairs - 1) + [False], task)
    text = compare()
    assert [line(text, start)[-1].startswith("[") for start in ("one", "all")] == [has_interval] * 2


def test_the_settings_of_a_seed_are_one_pair_of_all(
    tmp_path: Path, compare: Callable[..., str]
) -> None:
    for setting in ("n=1", "n=2", "n=4"):
        write(tmp_path / "a", [False] * 10 + [True] * 5, setting=setting)
        write(tmp_path / "b", [True] * 15, setting=setting)
    lines = compare().splitlines()
    [of_one] = [row for row in lines if row.startswith("n=1")]
    [of_all] = [row for row in lines if row.startswith("all")]
    assert of_all.split()[2:] == of_one.split()[2:], (
        "three copies of the same pairs tell no more than one"
    )


def test_failed_and_unpaired_episodes_are_left_out_and_counted(
    tmp_path: Path, compare: Callable[..., str]
) -> None:
    write(tmp_path / "a", [True] * 4)
    write(tmp_path / "a", [False], "lost", stop="failed")
    write(tmp_path / "b", [False] * 6)
    write(tmp_path / "b", [True], "lost")
    text = compare("b/episodes.jsonl")
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
        "other": "have no episode in common (setting, task, seed): goto 0 and open 0",
        "game": "goto 0 is not the same game in A and B: env_path is 'envs.babyai' and 'envs.crafter'",
        "lost": "have a failed episode",
        "none": "none cannot be read",
        "old": "old, episode 1, has no key 'setting', so it is in no table",
    }.items():
        assert words in error_of("compare", tmp_path / "a", tmp_path / other)
    said = error_of("compare", tmp_path / "a", tmp_path / "a", "--settings", "x", "-")
    assert "has no episodes of setting 'x'; it has -" in said


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        low, high = interval([draw.normal(0.3, 1.0, 40), draw.normal(0.3, 1.0, 40)])
        covered += low <= 0.3 <= high
    assert covered >= 51
