"""`slime-verlog report` as a person uses it: verdicts, several runs, and files that are broken."""

import json
import re
from pathlib import Path

import pytest

from inspection.report.numbers import MEASURES
from tests.fixtures.command import error_of
from tests.fixtures.recorded_episodes import make_turn, numbers, report, write

REPOSITORY = Path(__file__).parents[2]


def test_several_runs_stand_side_by_side_with_short_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/eval", "b/eval"):
        write(tmp_path / name, [make_turn("a", "THINK: so\nACTION: go")])
    write(tmp_path / "c/eval", [make_turn("a", "go")], "expert", "memory.n=1")
    report(tmp_path / "a/eval", tmp_path / "b/eval/episodes.jsonl", tmp_path / "c/eval")
    shown = capsys.readouterr().out
    assert re.search(
        r"number +\| `a/eval, policy` +\| `b/eval, policy` +\| `c/eval, memory.n=1, expert`", shown
    )
    assert (tmp_path / "a/eval/report.md").read_text() in shown
    assert set(numbers(tmp_path / "c/eval")["questions"].values()) == {"-"}, (
        "scripted players are not judged"
    )


def test_an_environment_that_was_lost_before_the_first_turn_is_reported(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    write(tmp_path, [], stop="failed", fault="game.py, line 3: broken")
    report(tmp_path)
    assert not recwarn.list
    column = numbers(tmp_path)
    assert column["questions"]["4"] == "act"
    assert any("No episode has a turn" in caution for caution in column["cautions"])
    assert column["examples"][0]["text"] == "game.py, line 3: broken"


def test_hostile_text_changes_neither_terminal_nor_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = (
        "\x1b[2J\x1b]0;x\x07<script>alert(1)</script> `|` | ![x](http://x) \u202e $x_{$ \ud800 "
        + "A" * 3000
    )
    turns = [
        make_turn(evil, f"THINK: {evil}\nACTION: {evil}", evil[:200], k % 2 == 0) for k in range(30)
    ]
    write(
        tmp_path,
        turns,
        task_name=evil[:90],
        setting=evil[:60],
        stop=evil[:30],
        fault=evil,
    )
    report(tmp_path)
    shown = capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    for text in (shown, page):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    outside_code = re.sub(r"`.*?`", "", page, flags=re.MULTILINE)
    assert "<script" not in outside_code and "![x](" not in outside_code
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) > 15 and all(line.endswith(" |") for line in rows)


def test_code_named_by_a_record_is_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for path in (str(trap), "trap", "os.path"):
        write(tmp_path / "run", [make_turn("a", "fly", "go", False)], env_path=path)
    report(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


TURN = {"prompt": [0], "response": "go", "executed_action": "go", "valid": True}
EPISODE = {"messages": [{"role": "user", "content": "x"}], "story": [TURN]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "holds no episodes"),
        ('{"messages": []}\n', "is not an episode: story: Field required"),
        (json.dumps({**EPISODE, "story": [{}]}) + "\n", "story.0.response: Field required"),
        (
            json.dumps({**EPISODE, "story": [{"response": "go"}]}) + "\n",
            "episode 1, has a turn without 'executed_action'",
        ),
        (
            json.dumps({**EPISODE, "messages": [{"role": "user", "content": 3}]}) + "\n",
            "messages.0.content",
        ),
        *(
            (json.dumps({**EPISODE, key: None}) + "\n", f"is not an episode: {key}: Input")
            for key in ("success", "return", "turns", "seed", "task_name", "stop", "setting")
        ),
        (
            json.dumps({**EPISODE, "return": float("nan")}) + "\n",
            "return: Input should be a finite number",
        ),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "episodes.jsonl").write_text(line)
    error = error_of("report", tmp_path)
    assert said in error and str(tmp_path) in error and not (tmp_path / "report.md").exists()


def test_a_missing_run_and_a_folder_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    assert "episodes.jsonl does not exist; run slime-verlog evaluate" in error_of(
        "report", tmp_path
    )
    write(tmp_path, [make_turn("a", "go")])
    error = error_of("report", tmp_path, "--out", tmp_path / "episodes.jsonl")
    assert "episodes.jsonl: File exists; choose a folder that can be written" in error


def test_every_number_is_explained_with_its_healthy_range() -> None:
    page = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    assert list(rows) == [item.key for item in MEASURES]
    for item in MEASURES:
        limits = item.healthy()
        if item.good is not None and item.act is not None:
            limits += f"; act at {item.show(item.act)} or {'less' if item.higher else 'more'}"
        assert rows[item.key] == (limits or "information only"), item.key
