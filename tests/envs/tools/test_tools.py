"""Tools: what is refused while they are read, what they may return, and what happens when one goes
wrong."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.calls import find_calls
from envs.errors import ToolError
from envs.tools import Tool, ToolEpisode, ToolResult, ToolSettings, load_tools, make_tool, tool
from envs.tools.results import read_result
from envs.tools.session import ToolSession

TOOLBOX = "tests.envs.tools.toolbox"
LIMITS = ToolSettings(output_chars=300)


def undocumented(a: int) -> int:
    return a


def without_hint(a) -> int:
    """Do.

    Args:
        a: It.
    """
    return a


def without_line(a: int, b: int) -> int:
    """Do.

    Args:
        a: It.
    """
    return a


def keywords(**values: int) -> int:
    """Do.

    Args:
        values: They.
    """
    return sum(values.values())


def custom_type(a: Path) -> int:
    """Do.

    Args:
        a: It.
    """
    return 1


class NoExecute(Tool):
    """Lacks execute."""


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (undocumented, "no docstring"),
        (without_hint, "missing a type hint"),
        (without_line, "no description for the argument 'b'"),
        (keywords, r"\*\*values.*name every argument"),
        (custom_type, "custom class"),
        (NoExecute, "no execute method"),
        (dict, "not a subclass"),
    ],
)
def test_a_contract_violation_is_refused_when_the_tool_is_registered(
    target: Any, words: str
) -> None:
    with pytest.raises(ToolError, match=words):
        make_tool(target)
    if not isinstance(target, type):
        with pytest.raises(ToolError, match=words):
            tool(target)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": 1}, None),
        ({}, "'a' is a required property"),
        ({"a": "1"}, "add: a: '1' is not of type 'integer'"),
        ({"a": 1.0}, "1.0 is not of type 'integer'"),
        ({"a": 1, "c": 2}, "'c' is not an argument; the arguments are a, b"),
    ],
)
def test_arguments_are_checked_against_the_schema(
    arguments: dict[str, Any], words: str | None
) -> None:
    (spec,) = load_tools(f"{TOOLBOX}:add")
    wrong = spec.check(arguments)
    assert wrong is None if words is None else words in wrong


def test_tools_come_from_a_file_and_entries_with_names_and_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from envs.tools import tool\n\n\n@tool\ndef twice(a: int) -> int:\n"
        '    """Double.\n\n    Args:\n        a: It.\n    """\n    return 2 * a\n'
    )
    entry = {
        "path": f"{TOOLBOX}:Counter",
        "name": "tally",
        "config": {"greeting": "hi"},
        "timeout_s": 3,
    }
    twice, tally, paint = load_tools([str(file), entry, f"{TOOLBOX}:make_picture"])
    assert (twice.name, twice.target(4), twice.stateful) == ("twice", 8, False)
    assert (tally.name, tally.config, tally.timeout_s, tally.stateful) == (
        "tally",
        {"greeting": "hi"},
        3,
        True,
    )
    assert paint.name == "paint"
    assert load_tools(str(file))[0].schema == twice.schema


PIXELS = np.zeros((4, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("value", "text", "images", "reward"),
    [
        ("text", "text", 0, 0.0),
        (None, "", 0, 0.0),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}', 0, 0.0),
        ({"text": "t", "image": PIXELS}, "t", 1, 0.0),
        ({"images": [PIXELS, PIXELS]}, "", 2, 0.0),
        (PIXELS[:, :, :1], "", 1, 0.0),
        (("text", 0.5, {}), "text", 0, 0.5),
        (("Berlin", 3.6), '["Berlin", 3.6]', 0, 0.0),
        ({"a": map(str, [1, 2]), "b": {3: 4}.keys()}, '{"a": ["1", "2"], "b": [3]}', 0, 0.0),
        ({"b", "a", "c"}, '["a", "b", "c"]', 0, 0.0),
        (({"a": 1}, 1, {"n": 2}), '{"a": 1}', 0, 1.0),
        (ToolResult("text", (PIXELS,), 0.25), "text", 1, 0.25),
    ],
)
def test_results_of_every_form_are_understood(
    value: Any, text: str, images: int, reward: float
) -> None:
    result = read_result(value, LIMITS)
    assert (result.text, len(result.images), result.reward) == (text, images, reward)
    assert all(isinstance(image, Image.Image) and image.mode == "RGB" for image in result.images)


class Textless:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "value",
    [9**5000, [9**5000], Textless(), {"text": Textless(), "image": None}],
    ids=["long number", "list of one", "object", "text of a mapping"],
)
def test_a_result_without_a_text_is_a_line_to_the_model(value: Any) -> None:
    with pytest.raises(ToolError, match="cannot become text"):
        read_result(value, LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": None},
        {"text": 5},
        {"images": None},
        {"metrics": None},
        {"metrics": {"a": "b"}},
        {"metrics": {"a": float("nan")}},
        {"reward": None},
        {"reward": float("nan")},
    ],
    ids=str,
)
def test_a_result_with_a_wrong_field_is_a_line_to_the_model(fields: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match=f"{next(iter(fields))[:6]}.* must"):
        read_result(ToolResult(**fields), LIMITS)


def test_results_are_bounded_and_can_be_encoded() -> None:
    result = read_result("a" * 5_000_000 + "\ud800 end", LIMITS)
    assert len(result.text) <= LIMITS.output_chars and "characters left out" in result.text
    assert result.text.startswith("aaa") and result.text.encode().endswith(b"end")


class AsyncTool(Tool):
    """All four methods await, as a client of a remote sandbox would."""

    async def create(self, episode: ToolEpisode) -> str:
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        return "ready"

    async def execute(self, word: str) -> tuple[str, float, dict[str, float]]:
        """Say a word.

        Args:
            word: The word.
        """
        assert asyncio.get_running_loop() is self.loop, (
            "connections live on one loop for the whole episode"
        )
        return word, 0.25, {}

    async def calc_reward(self) -> float:
        return 0.5

    async def release(self) -> None:
        self.loop = None


def test_a_stateful_tool_may_be_async_throughout() -> None:
    session = ToolSession([make_tool(AsyncTool)], ToolSettings())
    assert [result.text for result in session.create(ToolEpisode("task", 0))] == ["ready"]
    calls, errors = session.check(find_calls('{"name": "async_tool", "arguments": {"word": "hi"}}'))
    assert not errors
    result = session.run(calls[0], time.monotonic() + 10)
    assert (result.text, result.reward, session.reward()) == ("hi", 0.25, 0.5)
    session.release()
    assert not session.counts
