"""The numbers of `slime-verlog report`, against values computed by hand."""

import json
import random
from pathlib import Path

import pytest

from inspection.report.invalid import find_match
from inspection.report.reading import split_answer
from tests.fixtures.recorded_episodes import make_turn, number, numbers, write

BABYAI = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")


def _lamps(folder: Path, parrot: bool) -> None:
    """A player that quotes its observation and mostly follows it, or one with a template and random
    actions."""
    rng = random.Random(2)
    words = [
        "ball",
        "key",
        "door",
        "box",
        "lamp",
        "wall",
        "chair",
        "stone",
        "river",
        "tree",
        "gate",
        "lava",
    ]
    for seed in range(30):
        turns = []
        for _ in range(20):
            things = rng.sample(words, 3)
            seen = f"You see a {things[0]}, a {things[1]} and a {things[2]}."
            action = "stop" if "wall" in things else "go"
            if parrot or rng.random() < 0.2:
                action = rng.choice(["go", "stop"])
            thought = (
                "I think about my goal and carefully choose the best action now."
                if parrot
                else seen
            )
            turns.append(
                make_turn(seen, f"THINK: {thought} So I will act.\nACTION: {action}", action)
            )
        write(folder, turns, seed=seed, success=seed % 2 == 0, **{"return": float(seed % 2 == 0)})


def test_a_player_that_uses_what_it_sees_is_good(tmp_path: Path) -> None:
    _lamps(tmp_path, parrot=False)
    column = numbers(tmp_path)
    assert column["questions"]["1"] == "good"
    assert number(column, "observation_retrieval") == pytest.approx(1.0)
    assert (number(column, "valid_actions"), number(column, "reasoning_words")) == (1.0, 13)


def test_a_parrot_is_found_although_its_actions_vary(tmp_path: Path) -> None:
    _lamps(tmp_path, parrot=True)
    column = numbers(tmp_path)
    assert column["questions"]["1"] == "act"
    assert number(column, "distinct_reasoning") < 0.02
    assert number(column, "observation_retrieval") < 0.05
    assert number(column, "effective_actions") == pytest.approx(2.0, abs=0.01)


def test_loops_and_repeated_attempts_are_counted(tmp_path: Path) -> None:
    played = [("wall", "go")] * 3 + [("wall", "turn"), ("free", "go"), ("wall", "go")]
    walked = [make_turn(text, "go", "go") for text in ["an empty room"] * 6 + ["a door"]]
    write(tmp_path / "walk", walked, stop="time_limit")
    assert number(numbers(tmp_path / "walk"), "stuck_turns") == 0.0, (
        "a walk that leads somewhere repeats nothing"
    )
    write(tmp_path, [make_turn(text, action, action) for text, action in played], stop="time_limit")
    column = numbers(tmp_path)
    assert number(column, "stuck_turns") == pytest.approx(2 / 6), (
        "the third and the fourth attempt at the wall"
    )
    assert number(column, "out_of_time") == 1.0
    (stuck,) = column["examples"]
    assert (stuck["what"], stuck["seed"], stuck["turn"]) == ("2 repeated attempts", 1, 3)


def test_starts_with_equal_returns(tmp_path: Path) -> None:
    for seed, won in ((1, 1.0), (1, 1.0), (2, 0.0), (2, 1.0)):
        write(tmp_path, [make_turn("a", "go")], seed=seed, **{"return": won})
    assert number(numbers(tmp_path), "equal_returns") == 0.5
    for seed in (3, 4):
        write(tmp_path / "tasks", [make_turn("a", "go")], seed=seed, **{"return": 0.0})
    column = numbers(tmp_path / "tasks")
    assert number(column, "equal_returns") == 1.0
    assert column["numbers"]["equal_returns"]["verdict"] == "act"


def test_ends_of_episodes(tmp_path: Path) -> None:
    ends = [("terminated", 1), ("context", 8), ("max_turns", 8), ("failed", 8)]
    for seed, (stop, turns) in enumerate(ends):
        fault = "game.py, line 3: broken" if stop == "failed" else None
        write(
            tmp_path,
            [make_turn(f"{k}", "go") for k in range(turns)],
            seed=seed,
            stop=stop,
            fault=fault,
            progression=0.0 if fault else 0.5,
        )
    column = numbers(tmp_path)
    for key in ("out_of_time", "out_of_context", "lost_environment"):
        assert number(column, key) == 0.25, key
    assert number(column, "mean_progression") == 0.5, "that of a failed episode is not known"


def test_tokens_and_cut_answers_are_counted_where_they_are_recorded(tmp_path: Path) -> None:
    tokens = [{"text": ["x"] * n, "log_probs": [0.0] * n} for n in (2, 4, 9)]
    reasons = ("stop", "stop", "length")
    turns = [
        make_turn(f"{k}", "THINK: on and on", "go", k < 2, tokens=token, finish_reason=reason)
        for k, (token, reason) in enumerate(zip(tokens, reasons, strict=True))
    ]
    write(tmp_path, turns)
    column = numbers(tmp_path)
    assert number(column, "response_tokens") == 4
    assert number(column, "cut_answers") == pytest.approx(1 / 3)
    assert column["invalid"] == {"cut at the length limit": 1}


@pytest.mark.parametrize(
    ("response", "executed", "parts"),
    [
        ("THINK: I see a wall.\nACTION: turn left", "turn left", ("I see a wall.", "turn left")),
        ("<think>a wall</think> ACTION: turn left\nDone.", None, ("a wall", "turn left\nDone.")),
        ("turn left<|im_end|>", "turn left", ("", "turn left")),
        (
            "I could go anywhere in this big room",
            None,
            ("I could go anywhere in this big room", ""),
        ),
        (
            "Two and three make five, so the answer is 5",
            "5",
            ("Two and three make five, so the answer is 5", "5"),
        ),
        (
            "<think>\nlook first\n</think>\n\nThe answer\nis 5",
            "5",
            ("look first", "The answer\nis 5"),
        ),
        (
            "Look.\n<tool_call>\n{}\n</tool_call>",
            "view",
            ("Look.", "<tool_call>\n{}\n</tool_call>"),
        ),
        (
            "<tool_call>{}</tool_call> Action now",
            "view",
            ("", "<tool_call>{}</tool_call> Action now"),
        ),
        ("", None, ("", "")),
    ],
)
def test_an_answer_is_reasoning_and_action(
    response: str, executed: str | None, parts: tuple[str, ...]
) -> None:
    answer = split_answer(response, executed)
    assert (answer.reasoning, answer.action) == parts


def test_without_pictures_in_the_record_states_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, [make_turn("The picture shows what you see.", "go", "go") for _ in range(120)])
    record = json.loads((tmp_path / "episodes.jsonl").read_text())
    assert number(numbers(tmp_path), "stuck_turns") == 118 / 120
    for message in record["messages"][1:]:
        message["content"] = [
            {"type": "image", "image": None},
            {"type": "text", "text": message["content"]},
        ]
    (tmp_path / "episodes.jsonl").write_text(json.dumps(record) + "\n")
    assert number(numbers(tmp_path), "stuck_turns") is None


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("**Turn left.**", "turn left"),
        ("trun left", "turn left"),
        ("turn left, go forward", "turn left"),
        ("pick up the ball", "pick up"),
        ("drop\nbecause it is heavy", "drop"),
        ("I choose toggle", "toggle"),
        ("go to the red ball", None),
        ("", None),
    ],
)
def test_an_answer_near_a_legal_action_means_it(answer: str, action: str | None) -> None:
    assert find_match(answer, BABYAI) == action


def test_a_translation_is_suggested_with_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["ACTION: go"] * 6 + ["ACTION: Go!"] + ["ACTION: go now"] * 2
    said += ["I wonder what I could do here in this room"]
    turns = [make_turn(f"{k}", text, "go", text == "ACTION: go") for k, text in enumerate(said)]
    write(tmp_path, turns)
    column = numbers(tmp_path)
    assert column["invalid"] == {"near a legal action": 3, "no ACTION line": 1}
    assert number(column, "translatable") == 0.3
    shown = capsys.readouterr().out
    assert "would catch 3 of 4" in shown and "- `go now` → `go`, 2 times" in shown
