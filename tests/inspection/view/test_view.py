"""The command `slime-verlog view`: what it reads, what it writes, and what it refuses."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inspection import command
from inspection.records import find_changes, split_prompts, split_template
from inspection.view import build
from inspection.view.page import Packer
from tests.fixtures.played_episodes import invented_episode, record_episode, write_run
from tests.fixtures.slime_dumps import write_by_hand


def view(*words: str | Path) -> int:
    """Run the command; its exit code."""
    with pytest.raises(SystemExit) as ended:
        command.main(["view", *map(str, words)])
    return ended.value.code or 0  # type: ignore[return-value]


def blocks(page: Path) -> dict[str, list[Any]]:
    """The page's data: block names with their JSON lines."""
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([^<]*)</script>', page.read_text())
    return {
        name: [json.loads(line) for line in gzip.decompress(base64.b64decode(text)).decode().split("\n")]
        for name, text in found
        if not name.startswith("atlas")
    }


def test_a_folder_becomes_one_page_beside_its_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [invented_episode(seed) for seed in range(3)], setting="memory.n=2")
    assert view(run) == 0
    assert "run/episodes.html" in capsys.readouterr().out
    data = blocks(run / "episodes.html")
    rows = data["head"][0]["episodes"]
    assert [(row["setting"], row["seed"], row["success"]) for row in rows] == [
        ("memory.n=2", k, True) for k in range(3)
    ]
    shared, *episodes = data["chunk-0"]
    assert len(episodes) == 3 and len(shared["messages"]) == 4, "messages that episodes share are stored once"


def test_without_pillow_the_page_has_no_worlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [record_episode("envs.sokoban", "one_box", 3)])
    assert view(run) == 0 and "1 with their world" in capsys.readouterr().out
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setattr("inspection.view.replay.make_image", lambda pixels: pytest.fail("needs Pillow"))
    assert view(run) == 0
    assert "note: worlds are not drawn, because Pillow is missing" in capsys.readouterr().out


def test_most_limits_the_episodes_and_out_names_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, [invented_episode(seed) for seed in range(3)])
    assert view(run / "episodes.jsonl", "--most", 2, "--out", tmp_path / "a" / "b.html") == 0
    assert len(blocks(tmp_path / "a" / "b.html")["head"][0]["episodes"]) == 2


def test_two_runs_share_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [invented_episode(seed) for seed in (1, 2)]) for name in ("a", "b")]
    assert view(*runs) == 0
    head = blocks(runs[0] / "compare.html")["head"][0]
    assert head["runs"] == [str(run) for run in runs]
    assert [row.get("run", 0) for row in head["episodes"]] == [0, 0, 1, 1]


def test_several_files_in_a_folder_are_told_apart_by_setting(tmp_path: Path) -> None:
    for name in ("before", "after"):
        write_run(tmp_path / name, [invented_episode()])
    assert view(tmp_path) == 0
    rows = blocks(tmp_path / "episodes.html")["head"][0]["episodes"]
    assert [row["setting"] for row in rows] == ["after", "before"]


def test_a_cut_last_record_is_left_out_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, [invented_episode(1), invented_episode(2)])
    file = run / "episodes.jsonl"
    for cut, shown, notes in ((1, 2, 0), (40, 1, 1), (file.stat().st_size - 40, 0, 1)):
        file.write_bytes(file.read_bytes()[:-cut] if cut < 100 else file.read_bytes()[:40])
        assert view(run) == 0
        head = blocks(run / "episodes.html")["head"][0]
        assert len(head["episodes"]) == shown and len(head["problems"]) == notes
        assert ("the last record is cut or still being written" in capsys.readouterr().out) == bool(notes)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{folder}/none"], "none does not exist"),
        (["{folder}"], "has no episodes: expected episodes.jsonl, or .pt files"),
        (["{folder}"], "`slime-verlog train` and `slime-verlog evaluate` make a run"),
        (["{folder}/x.jsonl"], "line 1, is not"),
        (["{folder}/my.yaml"], "my.yaml is a YAML; view takes a run's folder or its episodes.jsonl"),
        (["{folder}/run", "--most", "0"], "--most must be at least 1, got 0"),
        (["{folder}/run", "--out", "{folder}/run/episodes.jsonl"], "exists, and does not end in .html"),
        (["{folder}/run", "--out", "{folder}/my.yaml/x.html"], "my.yaml is a file; choose another --out"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    write_run(tmp_path / "run", [invented_episode(env_path=None)])
    (tmp_path / "x.jsonl").write_text('{"story": 3}\n')
    (tmp_path / "my.yaml").write_text("n_env: 4\n")
    if words == ["{folder}"]:
        (tmp_path / "run" / "episodes.jsonl").unlink()
    with pytest.raises(SystemExit, match=f"error: .*{re.escape(sentence)}"):
        command.main(["view", *(word.format(folder=tmp_path) for word in words)])


def follow(folder: Path, steps: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds on the page after each step of a followed run, which Ctrl-C ends after the last."""
    waiting, seeds = iter(steps), []

    def sleep(seconds: float) -> None:
        page = folder / "episodes.html"
        seeds.append([row["seed"] for row in blocks(page)["head"][0]["episodes"]] if page.exists() else [])
        step = next(waiting, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(build.time, "sleep", sleep)
    assert view(folder, "--follow") == 0
    return seeds


def test_following_adds_new_episodes_and_stops_reloading_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [invented_episode(1)])
    page, seen = run / "episodes.html", []

    def sleep(seconds: float) -> None:
        head = blocks(page)["head"][0]
        seen.append((len(head["episodes"]), head["follow"]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        write_run(run, [invented_episode(len(seen) + 1)])

    monkeypatch.setattr(build.time, "sleep", sleep)
    assert view(run, "--follow", "--every", 2) == 0
    assert seen == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert blocks(page)["head"][0]["follow"] == 0
    assert "no longer reloads" in capsys.readouterr().out


def test_a_run_that_starts_over_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, [invented_episode(k, turns=9) for k in (1, 2)])

    steps = [(run / "episodes.jsonl").unlink, lambda: write_run(run, [invented_episode(7)])]
    assert follow(run, steps, monkeypatch) == [[1, 2], [1, 2], [7]]


def test_a_run_may_start_after_it_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    steps = [lambda: run.mkdir(), lambda: write_run(run, [invented_episode(4)])]
    assert follow(run, steps, monkeypatch) == [[], [], [4]]
    assert f"following {run} (no episodes yet)" in capsys.readouterr().out


def test_files_that_grow_side_by_side_keep_all_their_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, [invented_episode(seed)])
    steps = [lambda: write_run(tmp_path / "a", [invented_episode(2)])]
    assert follow(tmp_path, steps, monkeypatch) == [[0, 1], [0, 2, 1]]


def test_a_dump_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_by_hand(tmp_path / "whole")
    dump = (tmp_path / "whole" / "rollout_data" / "0.pt").read_bytes()
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "rollout_0.pt"
    steps = [lambda: file.write_bytes(dump[:1000]), lambda: file.write_bytes(dump)]
    assert [len(seeds) for seeds in follow(tmp_path / "run", steps, monkeypatch)] == [0, 0, 2]


def test_a_record_that_is_being_written_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (write_run(tmp_path / "x", [invented_episode(3, observation="é")]) / "episodes.jsonl").read_bytes()
    run = write_run(tmp_path / "run", [invented_episode(1)])
    file, whole = run / "episodes.jsonl", (run / "episodes.jsonl").read_bytes() + line
    half = whole[: whole.index("é".encode(), len(whole) - len(line)) + 1]
    steps = [lambda: file.write_bytes(half), lambda: file.write_bytes(whole)]
    assert follow(run, steps, monkeypatch) == [[1], [1], [1, 3]]


def test_under_a_memory_window_a_turn_shows_only_its_new_observation() -> None:
    episode = record_episode("envs.babaisai", "goto_win", 5, skill=0.5, max_turns=12)
    messages, story = split_prompts(episode)
    changes = find_changes(messages, story)
    assert [messages[i]["role"] for i in changes[0]] == ["system", "user"]
    assert all(len(turn["prompt"]) == 4 for turn in story[1:])
    assert all(fresh == turn["prompt"][-1:] for fresh, turn in zip(changes[1:], story[1:], strict=True))


def test_a_system_message_that_changes_is_shown_again() -> None:
    episode = invented_episode()
    episode["messages"].append({"role": "system", "content": "Now find the key."})
    episode["story"][2]["prompt"][0] = 4
    messages, story = split_prompts(episode)
    assert find_changes(messages, story)[2] == [4, 3]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n\nthere<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nHi\n\nthere<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\nHi\n\nthere<end_of_turn>\n"
        "<start_of_turn>model\n",
    ],
)
def test_template_text_is_split_into_roles(text: str) -> None:
    assert split_template(text) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n\nthere"},
    ]


def test_values_that_json_lacks_do_not_reach_the_page() -> None:
    episode = invented_episode(metrics={"x": float("nan")})
    episode["return"] = float("inf")
    episode["story"][0]["tokens"] = {"text": ["a", "\ud800"], "log_probs": [float("-inf"), -0.123456], "short": [1]}
    packer = Packer()
    packer.add(episode)
    assert packer.rows[0]["return"] is None
    (text,) = packer.blocks()
    line = json.loads(gzip.decompress(base64.b64decode(text)).decode().split("\n")[1])
    assert line["turns"][0]["tokens"] == {"text": ["a", "?"], "log_probs": [None, -0.1235]}
    assert line["metrics"] == {"x": None}
