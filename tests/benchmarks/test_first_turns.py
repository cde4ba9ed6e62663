"""What the first turns of Recall show about a policy."""

import sys
from pathlib import Path

import pytest

from benchmarks.first_turns import main
from tests.fixtures.played_episodes import record_episode, write_run


def test_a_first_turn_counts_if_it_names_the_light_and_a_later_one_if_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    episode = record_episode("envs.recall", "recall", 3, options={"max_steps": 5, "ask_every": 4})
    shown = episode["messages"][episode["story"][0]["prompt"][-1]]["content"]
    light = next(colour for colour in ("red", "green", "blue", "yellow") if f"first light is {colour}" in shown)
    other = "red" if light != "red" else "blue"
    for first, right in ((light, "1.000"), (other, "0.000")):
        for turn, colours in zip(episode["story"], (first, first, other, f"{other} {first}", first), strict=True):
            turn["response"] = f"THINK: {colours}. ACTION: next"
        folder = write_run(tmp_path / first / "run", [episode])
        monkeypatch.setattr(sys, "argv", ["first_turns", str(folder)])
        main()
        last = capsys.readouterr().out.splitlines()[-1]
        later = "0.333" if first == light else "1.000"
        assert last == f"{first}/run,1,{right},{later}"
