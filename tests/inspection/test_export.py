"""`slime-verlog export`: recorded episodes as rows for supervised training."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.play.transcript import Transcript
from slime_verlog import ConfigError
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.played_episodes import invented_episode, record_episode, write_run
from tests.fixtures.slime_dumps import make_samples, make_turn, save_like_slime


def export(run: object, out: Path, *words: object, of: Callable[..., Any] = slime_verlog) -> Any:
    """Export as rows for training."""
    return of("export", run, "--out", out, *words)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


INFO = {
    "executed_action": "go",
    "valid_action": True,
    "reward": 0.5,
    "truncated": False,
    "progression": 1.0,
}


def conversation_episode(seed: int = 1, **facts: Any) -> dict[str, Any]:
    """Three turns of `history: full`; the answer of the second is invalid."""
    story = Transcript()
    messages = [{"role": "system", "content": "Play."}]
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": f"You are at {turn}."}]
        story.add(
            messages, (), f"go {turn}", {**INFO, "valid_action": turn != 1, "terminated": turn == 2}
        )
        messages = [*messages, {"role": "assistant", "content": f"go {turn}"}]
    return {
        **invented_episode(seed),
        "messages": story.messages,
        "story": story.turns,
        "return": 1.5,
        **facts,
    }


def scripted_episode(player: str, response: str) -> dict[str, Any]:
    """One turn under a prompt that asks for a thought and an action."""
    story = Transcript()
    prompt = [
        {
            "role": "user",
            "content": "Answer in exactly this form:\nTHINK: your reasoning\nACTION: one action",
        }
    ]
    story.add(prompt, (), response, {**INFO, "terminated": True})
    return {
        **invented_episode(1),
        "messages": story.messages,
        "story": story.turns,
        "player": player,
    }


def test_bare_actions_of_a_scripted_player_are_not_written_as_answers_to_a_prompt_that_asks_for_more(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "bare", [scripted_episode("expert", "go west")])
    error = export(tmp_path / "bare", tmp_path / "bare.jsonl", of=error_of)
    assert (
        "the player expert answered 'go west'" in error
        and "python -m inspection.demonstrations" in error
    )
    assert not (tmp_path / "bare.jsonl").exists()
    for player, response in (
        ("expert", "THINK: The exit is west.\nACTION: go west"),
        ("my-model", "go west"),
    ):
        run = write_run(tmp_path / player, [scripted_episode(player, response)])
        assert export(run, tmp_path / f"{player}.jsonl") == 0


def test_a_window_gives_one_row_per_turn_and_full_history_one_per_episode(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    played = record_episode("envs.babyai", "goto", 3)
    write_run(tmp_path, [played, conversation_episode()])
    assert export(tmp_path, tmp_path / "rows.jsonl") == 0
    *windows, whole = rows(tmp_path / "rows.jsonl")
    assert len(windows) == played["turns"] > 2
    for number, row in enumerate(windows):
        turn = played["story"][number]
        prompt = [played["messages"][index] for index in turn["prompt"]]
        assert [(m["role"], m["content"]) for m in row["messages"][:-1]] == [
            (m["role"], m["content"]) for m in prompt
        ]
        assert row["messages"][-1] == {
            "role": "assistant",
            "content": turn["response"],
            "step_loss_mask": 1,
        }
        shown = [m["step_loss_mask"] for m in row["messages"][:-1] if m["role"] == "assistant"]
        assert shown == [0] * (number > 0)
        assert (row["metadata"]["turn"], row["metadata"]["turns"], row["metadata"]["seed"]) == (
            number,
            1,
            3,
        )
    assert [m["content"] for m in whole["messages"] if m["role"] == "assistant"] == [
        "go 0",
        "go 1",
        "go 2",
    ]
    assert all(m["step_loss_mask"] for m in whole["messages"])
    assert (whole["metadata"]["turn"], whole["metadata"]["turns"]) == (0, 3)


def test_a_row_that_ends_with_notes_says_so(tmp_path: Path) -> None:
    episode = conversation_episode()
    episode["story"][2]["summary"] = {"tokens": 3.0}
    write_run(tmp_path, [episode, conversation_episode(2)])
    assert export(tmp_path, tmp_path / "rows.jsonl") == 0
    found = [row["metadata"]["notes"] for row in rows(tmp_path / "rows.jsonl")]
    assert found == [True, False]


def test_a_file_that_exists_is_replaced_only_on_request(tmp_path: Path) -> None:
    write_run(tmp_path, [conversation_episode()])
    out = tmp_path / "sft.jsonl"
    out.write_text("earlier")
    assert f"--out {out} exists; give another file" in export(tmp_path, out, of=error_of)
    assert out.read_text() == "earlier"
    record = tmp_path / "episodes.jsonl"
    assert "would be lost" in export(tmp_path, record, "--overwrite", of=error_of)
    assert export(tmp_path, out, "--overwrite") == 0 and rows(out)


def test_valid_only_masks_invalid_answers_and_leaves_out_their_rows(tmp_path: Path) -> None:
    invalid = invented_episode(2)
    invalid["story"][1]["valid"] = False
    write_run(tmp_path, [conversation_episode(), invalid])
    assert export(tmp_path, tmp_path / "rows.jsonl", "--valid-only") == 0
    whole, *windows = rows(tmp_path / "rows.jsonl")
    assert [m["step_loss_mask"] for m in whole["messages"] if m["role"] == "assistant"] == [1, 0, 1]
    assert [row["metadata"]["turn"] for row in windows] == [0, 2]


def test_filters_choose_episodes_and_lost_ones_are_never_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = invented_episode(1, stop="failed", fault="gone")
    poor = invented_episode(2, **{"return": 0.2, "success": False})
    other = invented_episode(3, task_name="other")
    write_run(tmp_path, [lost, poor, other, invented_episode(4)])
    out = tmp_path / "rows.jsonl"
    for words, seeds in (
        ("", {2, 3, 4}),
        ("--successful", {3, 4}),
        ("--min-return 0.2", {2, 3, 4}),
        ("--min-return 0.3 --task other", {3}),
    ):
        assert export(tmp_path, out, "--overwrite", *words.split()) == 0
        assert {row["metadata"]["seed"] for row in rows(out)} == seeds
    assert "3 rows from 1 of 4 episodes written to" in capsys.readouterr().out
    before = out.read_bytes()
    error = export(tmp_path, out, "--overwrite", "--task", "none", of=error_of)
    assert "none of the 4 episodes is left to write" in error
    assert out.read_bytes() == before and not list(tmp_path.glob(".*.part"))


def test_a_least_return_that_is_no_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, tmp_path / "a.jsonl", "--min-return", "nan") == 2
    assert "must be a finite number, got 'nan'" in capsys.readouterr().err


def test_an_export_that_fails_in_the_middle_leaves_an_earlier_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [invented_episode()])
    out = tmp_path / "out" / "a.jsonl"
    out.parent.mkdir()
    out.write_bytes(b"earlier")

    def read(*_: object) -> Iterator[dict[str, Any]]:
        yield from (invented_episode(seed, turns=150) for seed in (1, 2))
        assert out.with_name(".a.jsonl.part").stat().st_size > 0, "the first rows are written"
        raise ConfigError("the rest is damaged")

    monkeypatch.setattr("inspection.view.sources.read_episodes", read)
    assert export(tmp_path, out, "--overwrite", of=error_of) == "error: the rest is damaged"
    assert out.read_bytes() == b"earlier" and list(out.parent.iterdir()) == [out]


def test_the_calls_in_an_agents_prompts_are_kept(tmp_path: Path) -> None:
    call = {
        "id": "c00000000",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 2}},
    }
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c00000000", "name": "add"},
    ]
    episode = {**invented_episode(turns=1), "messages": messages}
    episode["story"][0] |= {"prompt": [0, 1, 2], "response": "4"}
    write_run(tmp_path, [episode])
    assert export(tmp_path, tmp_path / "rows.jsonl") == 0
    (row,) = rows(tmp_path / "rows.jsonl")
    assert row["messages"][:-1] == [
        m | {"step_loss_mask": int(m["role"] != "assistant")} for m in messages
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --out a.json", "--out must end in .jsonl"),
        ("seen --out a.jsonl", "seed 9 has pictures"),
        ("dumps --out a.jsonl", "give --tokenizer with the model's folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), [invented_episode()])
    messages = [{"role": "user", "content": [{"type": "image", "image": "k"}]}] * 2
    write_run(Path("seen"), [invented_episode(9, turns=1, messages=messages)])
    save_like_slime(Path("dumps"), make_samples(make_turn(1, 0, last=True)), 0)
    assert sentence in error_of("export", *words.split())
    assert not list(Path().glob("*.jsonl"))
