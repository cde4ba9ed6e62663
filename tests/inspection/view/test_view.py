"""The command `slime-verlog view`: what it reads, what it writes, and what it refuses."""

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inspection.records import split_template
from inspection.view import build
from inspection.view.page import Packer
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.played_episodes import invented_episode, write_run
from tests.fixtures.slime_dumps import write_by_hand
from tests.inspection.view.pages import blocks, head_of


def test_a_folder_becomes_one_page_beside_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(
        tmp_path / "run", [invented_episode(seed) for seed in range(3)], setting="memory.n=2"
    )
    assert slime_verlog("view", run) == 0
    assert "run/episodes.html" in capsys.readouterr().out
    data = blocks(run / "episodes.html")
    rows = data["head"][0]["episodes"]
    assert [(row["setting"], row["seed"], row["success"]) for row in rows] == [
        ("memory.n=2", k, True) for k in range(3)
    ]
    shared, *episodes = data["chunk-0"]
    assert len(episodes) == 3 and len(shared["messages"]) == 4, (
        "messages that episodes share are stored once"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("{folder}/none", "none does not exist"),
        ("{folder}/empty", "has no episodes: expected episodes.jsonl, or .pt files"),
        ("{folder}/x.jsonl", "line 1, is not"),
        (
            "{folder}/my.yaml",
            "my.yaml is a YAML; view takes a run's folder or its episodes.jsonl",
        ),
        ("{folder}/run --worlds -1", "--worlds must be at least 0, got -1"),
        (
            "{folder}/run --out {folder}/run/episodes.jsonl",
            "exists, and does not end in .html",
        ),
        (
            "{folder}/run --out {folder}/my.yaml/x.html",
            "my.yaml is a file; choose another --out",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, words: str, sentence: str) -> None:
    write_run(tmp_path / "run", [invented_episode(env_path=None)])
    (tmp_path / "x.jsonl").write_text('{"story": 3}\n')
    (tmp_path / "my.yaml").write_text("n_env: 4\n")
    (tmp_path / "empty").mkdir()
    assert sentence in error_of("view", *words.format(folder=tmp_path).split())


def follow(
    folder: Path, steps: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """The seeds on the page after each step of a followed run, which Ctrl-C ends after the last."""
    waiting = iter(steps)
    seeds = []

    def sleep(seconds: float) -> None:
        page = folder / "episodes.html"
        seeds.append([row["seed"] for row in head_of(page)["episodes"]] if page.exists() else [])
        step = next(waiting, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(build.time, "sleep", sleep)
    assert slime_verlog("view", folder, "--follow") == 0
    return seeds


def grown(run: Path) -> list[Callable[[], object]]:
    return [lambda: write_run(run, [invented_episode(2)])]


def started_over(run: Path) -> list[Callable[[], object]]:
    return [(run / "episodes.jsonl").unlink, lambda: write_run(run, [invented_episode(7, turns=1)])]


def half_written(run: Path) -> list[Callable[[], object]]:
    file = run / "episodes.jsonl"
    whole = file.read_bytes() + file.read_bytes().replace(b"A wall", "é".encode())
    half = whole[: whole.rindex("é".encode()) + 1]
    return [lambda: file.write_bytes(half), lambda: file.write_bytes(whole)]


def episodes_begin(run: Path) -> list[Callable[[], object]]:
    """A training that was followed before its first evaluation."""
    written = json.dumps(invented_episode(2, player="training", setting="update 3")) + "\n"
    return [lambda: (run / "training.jsonl").write_text(written)]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (grown, [[1], [1, 2]]),
        (started_over, [[1], [1], [7]]),
        (half_written, [[1], [1], [1, 1]]),
        (episodes_begin, [[1], [1, 2]]),
    ],
)
def test_a_followed_page_has_what_the_run_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, seen: list[list[int]]
) -> None:
    run = write_run(tmp_path / "run", [invented_episode(1)])
    assert follow(run, change(run), monkeypatch) == seen
    assert head_of(run / "episodes.html")["follow"] == 0, "it no longer reloads at the end"


def test_a_run_may_start_after_it_is_followed_and_dumps_are_read_when_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_by_hand(tmp_path / "whole")
    dump = (tmp_path / "whole" / "rollout_data" / "0.pt").read_bytes()
    run = tmp_path / "run"
    file = tmp_path / "run" / "rollout_0.pt"
    steps = [run.mkdir, lambda: file.write_bytes(dump[:1000]), lambda: file.write_bytes(dump)]
    assert [len(seeds) for seeds in follow(run, steps, monkeypatch)] == [0, 0, 0, 2]


def test_a_cut_last_record_is_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, [invented_episode(1), invented_episode(2)])
    file = run / "episodes.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    assert slime_verlog("view", run) == 0
    assert [row["seed"] for row in head_of(run / "episodes.html")["episodes"]] == [1]
    assert "the last record is cut" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi\n\nthere<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe "
        "brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi\n\nthere<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>system\nBe "
        "brief.<end_of_turn>\n<start_of_turn>user\nHi\n\nthere<end_of_turn>\n<start_of_turn>model\n",
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
    episode["story"][0]["tokens"] = {
        "text": ["a", "\ud800"],
        "log_probs": [float("-inf"), -0.123456],
        "short": [1],
    }
    packer = Packer()
    packer.add(episode)
    assert packer.rows[0]["return"] is None
    (text,) = packer.blocks()
    line = json.loads(gzip.decompress(base64.b64decode(text)).decode().split("\n")[1])
    assert line["turns"][0]["tokens"] == {"text": ["a", "?"], "log_probs": [None, -0.1235]}
    assert line["metrics"] == {"x": None}
