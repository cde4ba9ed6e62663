"""Questions: pictures keep their place between the texts, and what cannot be shown is refused by
name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from envs.errors import ConfigError
from envs.questions import Question, QuestionSettings, read_question
from envs.tools import build_env
from rollout.bridge.settings import MemorySettings
from rollout.play.conversation import build_messages
from rollout.play.memory import build_memory
from tests.envs.tools.test_tool_env import call

RED, BLUE = Image.new("RGB", (30, 20), "red"), Image.new("RGB", (20, 30), "blue")
TEXT = "Is the colour of <image> that of\n<image>?"
PARTS = [
    {"type": "text", "text": "Is the colour of "},
    {"type": "image", "image": RED},
    {"type": "text", "text": " that of\n"},
    {"type": "image", "image": BLUE},
    {"type": "text", "text": "?"},
]
USER = [{"role": "user", "content": PARTS}]


def row(**fields: Any) -> Question:
    sample = SimpleNamespace(metadata={"task": "t", "seed": 0})
    return read_question(sample, QuestionSettings(data=(fields,)))[0]


def sample(prompt: Any, images: Any = None, **more: Any) -> SimpleNamespace:
    inputs = {"images": images, "videos": None, **more}
    return SimpleNamespace(metadata={}, prompt=prompt, label="no", multimodal_inputs=inputs)


def asked(source: SimpleNamespace) -> Question:
    return read_question(source, QuestionSettings())[0]


INTERLEAVED = {
    "a row with marks": lambda: row(question=TEXT, images=[RED, BLUE]),
    "a row with messages": lambda: row(question=USER),
    "a row with messages and marks": lambda: row(
        question=[{"role": "user", "content": TEXT}], images=[RED, BLUE]
    ),
    "slime's sample": lambda: asked(sample(USER, [RED, BLUE])),
    "slime's sample with marks": lambda: asked(sample(TEXT, [RED, BLUE])),
}


@pytest.mark.parametrize("way", INTERLEAVED)
def test_interleaved_pictures_keep_their_places(way: str) -> None:
    question = INTERLEAVED[way]()
    assert question.text == TEXT and question.images == (RED, BLUE)
    assert question.pieces == ("Is the colour of ", " that of\n", "?")


def test_both_histories_show_interleaved_pictures_in_their_places() -> None:
    tools = ["tests.envs.tools.toolbox:make_picture"]
    env = build_env(sample(USER, [RED, BLUE]), SimpleNamespace(env={"tools": tools}))
    first = env.reset()
    assert env.format_observation(first) == USER and first["obs_str"] == TEXT
    memory = build_memory(MemorySettings())
    message = build_messages(memory, "", [], first, 0, "")[-1]
    shown = [part.get("text") or part["image"] for part in message["content"]]
    assert shown == ["Current Observation:\nIs the colour of ", RED, " that of\n", BLUE, "?"]
    later, *_ = env.step(call("paint", colour="red") + " \ufffc")
    message = build_messages(memory, "", [], later, 1, "")[-1]
    shown = [part.get("text") or part["image"].size for part in message["content"]]
    before = ["Current Observation:\nIs the colour of ", RED.size, " that of\n", BLUE.size]
    assert shown == [(28, 28), *before, "?\npaint: all red"]


def test_each_round_of_seeds_asks_every_row_once() -> None:
    rows = tuple({"question": f"Question {k}?"} for k in range(7))

    def ask(seed: int) -> str:
        given = SimpleNamespace(metadata={"task": "t", "seed": seed})
        return read_question(given, QuestionSettings(data=rows))[0].text

    rounds = [[ask(seed) for seed in range(first, first + 7)] for first in (0, 7)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == [row["question"] for row in rows]
    assert rounds[0] != rounds[1], "in another order"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("q.jsonl", '{"question": "a"}\n\n{"question"\n', r"q.jsonl, line 3, is damaged"),
        ("q.json", "[1", "q.json is damaged, not valid JSON"),
        ("q.json", "[1]", r"q.json must hold a list of objects, got \[1\]"),
        ("q.csv", "question\na\n", "q.csv must be a .parquet, .jsonl or .json file"),
    ],
)
def test_data_that_cannot_be_read_is_named_with_its_line(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    given = SimpleNamespace(metadata={"task": "t", "seed": 0})
    with pytest.raises(ConfigError, match=words):
        read_question(given, QuestionSettings(data=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="env.data must hold a list of objects"):
        read_question(given, QuestionSettings(data=(5,)))


def user(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]


URL = "https://example.org/a.png"


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            user({"type": "video", "video": "a.mp4"}),
            "'type': 'video'.*; a user message takes 'text' and",
        ),
        (user({"text": "What?"}), "the content part {'text': 'What"),
        (user({"type": "image", "image": URL}), f"is the URL {URL}; URLs are not fetched"),
        (
            [{"role": "system", "content": [PARTS[1]]}],
            "a question's system message has the content part",
        ),
    ],
)
def test_unsupported_parts_are_refused_with_their_type(question: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        row(question=question)
    with pytest.raises(ConfigError, match=words):
        asked(sample(question))


def test_a_sample_with_videos_is_refused() -> None:
    with pytest.raises(ConfigError, match="comes with videos; a question takes images only"):
        asked(sample("What?", None, videos=[1]))
