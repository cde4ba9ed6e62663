"""`slime-verlog report` as a person uses it: verdicts, alarms over updates, several runs, and files that are broken."""

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inspection.command import main
from inspection.records import append_episode
from inspection.report.numbers import MEASURES, Verdict
from rollout.bridge.sample import facts_of
from rollout.data_source import EpisodeSource
from rollout.evaluate import evaluate
from rollout.play.runtime import close_runtimes
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.recorded_episodes import make_turn, number, numbers, report, write
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.inspection.test_text_episode import COUNT, EXPERT, play

REPOSITORY = Path(__file__).parents[2]


def _fill(folder: Path, words: int, valid: float, spread: float, setting: str = "-", player: str = "policy") -> None:
    """20 episodes of 10 turns with this many words of reasoning, share of valid answers, and spread of returns."""
    rng = random.Random(words)
    for seed in range(20):
        turns = []
        for k in range(10):
            good = rng.random() < valid
            thought = " ".join(rng.choice(["wall", "key", "door", "left", "right", "so"]) for _ in range(words))
            action = rng.choice(["go", "stop"])
            turns.append(
                make_turn(f"{seed} {k}", f"THINK: {thought}\nACTION: {action if good else 'fly'}", action, good)
            )
        write(folder, turns, player, setting, seed=seed, **{"return": spread * (seed % 2)})


def _alarms(folder: Path) -> dict[str, Any]:
    return {alarm["name"]: alarm for alarm in json.loads((folder / "report.json").read_text())["alarms"]}


def test_answers_that_grow_while_validity_falls_raise_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for update, words, valid in ((0, 20, 1.0), (20, 40, 0.95), (40, 200, 0.6)):
        _fill(tmp_path, words, valid, 1.0, f"update {update}")
    report(tmp_path)
    alarm = _alarms(tmp_path)["exploding length"]
    assert alarm["verdict"] == Verdict.ACT
    assert "from 20 to 200 words" in alarm["sentence"]
    shown = capsys.readouterr().out
    assert shown.index("exploding length") < shown.index("1. Stop the run") < shown.index("| number")
    assert (tmp_path / "report.md").read_text() in shown, "the terminal shows the page"


def test_answers_without_reasoning_are_compared_in_tokens(tmp_path: Path) -> None:
    for update, length in ((0, 4), (20, 9)):
        valid = update == 0
        turns = [make_turn(str(k), "go", valid=valid, tokens={"text": ["x"] * length}) for k in range(30)]
        write(tmp_path, turns, setting=f"update {update}")
    report(tmp_path)
    assert "answers grew from 4 to 9 tokens" in _alarms(tmp_path)["exploding length"]["sentence"]


def test_growing_answers_that_stay_valid_are_only_worth_a_look(tmp_path: Path) -> None:
    for update, words in ((0, 20), (20, 60)):
        _fill(tmp_path / f"update_{update}", words, 1.0, 1.0)
    report(tmp_path / "update_20", tmp_path / "update_0", "--out", tmp_path)
    assert _alarms(tmp_path)["growing length"]["verdict"] == Verdict.LOOK


def test_returns_whose_variance_vanishes_raise_an_alarm(tmp_path: Path) -> None:
    _fill(tmp_path, 20, 1.0, 1.0, "update 0")
    _fill(tmp_path, 20, 1.0, 0.0, "update 10")
    report(tmp_path)
    alarm = _alarms(tmp_path)["vanishing variance of returns"]
    # The returns are 0 and 1, ten times each: the variance is 10 / 19 / 2.
    assert alarm["verdict"] == Verdict.ACT and "fell from 0.513 to 0 at 0% success" in alarm["sentence"]


@pytest.mark.parametrize("key", ["memory.n", "env.max_steps", "env.steps"])
def test_sweeps_are_no_updates_and_get_columns_without_alarms(tmp_path: Path, key: str) -> None:
    for setting, words in ((f"{key}=1", 20), (f"{key}=2", 90)):
        _fill(tmp_path, words, 1.0, 1.0, setting)
    report(tmp_path)
    assert not _alarms(tmp_path)
    columns = json.loads((tmp_path / "report.json").read_text())["columns"]
    assert [column["label"] for column in columns] == [f"{key}=1", f"{key}=2"]


def test_several_runs_stand_side_by_side_with_short_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/eval", "b/eval"):
        _fill(tmp_path / name, 20, 1.0, 1.0)
    report(tmp_path / "a/eval", tmp_path / "b/eval/episodes.jsonl")
    shown = capsys.readouterr().out
    assert re.search(r"number +\| `a/eval` +\| `b/eval` +\| healthy", shown)
    assert (tmp_path / "a/eval/report.md").exists()


def test_the_page_is_written_beside_the_run(tmp_path: Path) -> None:
    _fill(tmp_path, 20, 0.9, 1.0)
    report(tmp_path / "episodes.jsonl")
    page = (tmp_path / "report.md").read_text()
    for question in ("diverse", "enough reasoning", "valid?", "fail?"):
        assert re.search(rf"^\| .*{re.escape(question)}", page, re.MULTILINE)


@pytest.mark.parametrize("player", ["expert", "random"])
def test_scripted_players_give_no_reasons_and_raise_no_alarm(
    tmp_path: Path, player: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = play(tmp_path, COUNT + EXPERT, player, max_turns=50)
    for seed in range(30):
        turns = [make_turn(f"{seed} {k}", "up", "up") for k in range(3)]
        write(tmp_path, turns, player, seed=seed, success=True, **{"return": 1.0})
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "episodes.jsonl").write_text(json.dumps({"setting": "-", "player": player, **facts}) + "\n")
    column = numbers(tmp_path)
    verdicts = [column["questions"][str(k)] for k in (1, 2, 3, 4)]
    assert verdicts == ["-", "-", "-", "-"]
    assert f"The {player} player is a baseline" in capsys.readouterr().out
    assert number(numbers(tmp_path / "one"), "answers_with_reasoning") == 0.0


async def _evaluate(folder: Path, answer: str) -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda _body, _n: answer) as engine:
        args = rollout_args(folder, engine.port, eval={"episodes": 4, "max_turns": 3})
        try:
            output = await evaluate(args, EpisodeSource(args))
        finally:
            await close_runtimes()
    for result in output.data.values():
        for sample in result["samples"]:
            append_episode(folder / "episodes.jsonl", facts_of(sample), "policy")


def test_episodes_of_an_engine_say_why_answers_ended(tmp_path: Path) -> None:
    asyncio.run(_evaluate(tmp_path, "THINK: the way is free\nACTION: left"))
    column = numbers(tmp_path)
    assert (column["episodes"], number(column, "cut_answers")) == (4, 0.0)
    assert number(column, "reasoning_words") == 4


def test_episodes_without_any_progress_are_an_alarm(tmp_path: Path) -> None:
    for seed in range(20):
        write(tmp_path, [make_turn(f"{seed}", "go")], seed=seed, **{"return": -0.1 * (seed % 2)})
    column = numbers(tmp_path)
    assert column["numbers"]["mean_progression"]["verdict"] == "act"
    assert "`20 terminated`" in (tmp_path / "report.md").read_text()


def test_a_model_without_reasoning_is_told_to_reason(tmp_path: Path) -> None:
    write(tmp_path, [make_turn(f"{k}", "go") for k in range(9)])
    column = numbers(tmp_path)
    assert column["questions"]["2"] == "act"
    assert number(column, "reasoning_words") is None
    assert number(column, "distinct_reasoning") is None


def test_one_episode_says_which_numbers_mean_nothing(tmp_path: Path) -> None:
    write(tmp_path, [make_turn("a", "THINK: so\nACTION: go"), make_turn("b", "THINK: so\nACTION: go")])
    column = numbers(tmp_path)
    assert "success and the spread of returns mean little" in column["cautions"][0]
    assert column["numbers"]["success"]["error"] is None
    assert number(column, "equal_returns") is None


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


def test_hostile_text_changes_neither_terminal_nor_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x1b]0;x\x07<script>alert(1)</script> `|` | ![x](http://x) \u202e $x_{$ \ud800 " + "A" * 3000
    turns = [make_turn(evil, f"THINK: {evil}\nACTION: {evil}", evil[:200], k % 2 == 0) for k in range(30)]
    write(tmp_path, turns, task_name=evil[:90], setting=evil[:60], stop=evil[:30], fault=evil, seed=evil[:50])
    report(tmp_path)
    shown = capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    for text in (shown, page):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    outside_code = re.sub(r"`.*?`", "", page, flags=re.MULTILINE)
    assert "<script" not in outside_code and "![x](" not in outside_code
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) > 20 and all(line.endswith(" |") for line in rows)


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
        ("not json\n", "is not JSON"),
        ("[1, 2]\n", "is not an episode"),
        ('{"messages": []}\n', "is not an episode: story: Field required"),
        (json.dumps({**EPISODE, "story": [1]}) + "\n", "is not an episode: story.0"),
        (json.dumps({**EPISODE, "story": [{}]}) + "\n", "'prompt' is missing"),
        (json.dumps({**EPISODE, "story": [{**TURN, "prompt": [7]}]}) + "\n", "list index out of range"),
        (
            json.dumps({**EPISODE, "story": [{**TURN, "response": 3}]}) + "\n",
            "is not an episode: story.0.response: Input should",
        ),
        (json.dumps({**EPISODE, "messages": [{"content": 3}]}) + "\n", "is not a record of an episode"),
        (json.dumps({**EPISODE, "return": float("nan")}) + "\n", "return must be a finite number"),
        (json.dumps({**EPISODE, "return": "many"}) + "\n", "could not convert"),
        ("[" * 200_000 + "\n", "is not JSON"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "episodes.jsonl").write_text(line)
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path)])
    text = str(end.value.code)
    assert text.startswith("error: ") and said in text and "Traceback" not in text and "\n" not in text
    assert str(tmp_path) in text and not (tmp_path / "report.md").exists()


def test_a_missing_run_and_a_folder_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="episodes.jsonl does not exist; run slime-verlog evaluate"):
        main(["report", str(tmp_path)])
    write(tmp_path, [make_turn("a", "go")])
    with pytest.raises(SystemExit, match="cannot be written: .*; choose another folder with --out"):
        main(["report", str(tmp_path), "--out", str(tmp_path / "episodes.jsonl")])


def test_an_interrupted_run_is_reported_up_to_its_last_whole_episode(tmp_path: Path) -> None:
    write(tmp_path, [make_turn("a", "go")])
    with open(tmp_path / "episodes.jsonl", "a") as file:
        file.write('{"setting": "-", "st')
    assert numbers(tmp_path)["episodes"] == 1


def test_help_answers_without_slow_packages() -> None:
    code = "import sys\nsys.argv = ['x', 'report', '--help']\nfrom inspection.command import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "print([name for name in ('torch', 'numpy', 'matplotlib', 'transformers') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert shown.stdout.rstrip().endswith("[]")


def test_every_number_is_explained_with_its_healthy_range() -> None:
    page = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    assert list(rows) == [item.key for item in MEASURES]
    for item in MEASURES:
        limits = item.healthy()
        if item.good is not None and item.act is not None:
            limits += f"; act at {item.show(item.act)} or {'less' if item.higher else 'more'}"
        assert rows[item.key] == (limits or "information only"), item.key
