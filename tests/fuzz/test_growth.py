"""Reading takes time in proportion to the text: every regular expression, and every reader of
untrusted text.

What is compared is the CPU time of a text with that of one four times as long; a quadratic reader
takes sixteen times as long, and is found long before its absolute time matters. A busy machine can
distort that, so these tests are slow ones.
"""

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envs import babaisai, babyai, crafter
from envs.calls import find_calls
from envs.questions.grading import exact, find_answer
from envs.questions.math_server import read_result
from envs.swe.tools import harmless, parse_response
from envs.text_game import clean_command, find_action
from envs.tools.results import clip
from tests.fuzz.targets import QUESTION, encoder, game

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("rollout", "envs", "advantage", "inspection", "embedded")
PUMPS = (
    *(" ", "\n", "\n ", "\t", "a", "ab ", "1", "1/", "-", "(", "a)", "<", ">"),
    *("[", "{", "}", "=", "/", ".", "_", "\x1b["),
)
NEGLIGIBLE_S = 0.004
GUARDED = {
    # Text after the last closing bracket is cut off first, and before it every opening one is
    # closed.
    r"\([^)]*\)": "envs/crafter/vocabulary.py",
    # Only the last 200 characters are searched.
    r"-=[^\n]*=-\s*-?\d+/\d+$|(?<!\s)\s*-?\d+/\d+$": "envs/textworld/player.py",
}
"""Expressions that take the square of a text's length, and where the text that they see is
bounded."""


def superlinear(read: Callable[[str], Any], head: str, pump: str, tail: str) -> int | None:
    """The length at which reading begins to take far more than its share of time, None if it never
    does."""
    before = 0.0
    for length in (100, 400, 1600, 6400):
        text = head + pump * (length // len(pump)) + tail
        seconds = cpu_seconds(read, text)
        if seconds > NEGLIGIBLE_S:
            # Once more, and the best of three: an interrupted process is not a slow reader.
            seconds = min(seconds, cpu_seconds(read, text), cpu_seconds(read, text))
            if seconds > max(NEGLIGIBLE_S, 8 * before):
                return length
        before = max(seconds, NEGLIGIBLE_S / 8)
    return None


def cpu_seconds(read: Callable[[str], Any], text: str) -> float:
    began = time.thread_time()
    read(text)
    return time.thread_time() - began


def expressions() -> Iterator[tuple[str, str, str]]:
    """(file, pattern with its flags, method) of every constant regular expression in the
    project."""
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            compiled = {}
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    compiled[ast.unparse(node.targets[0])] = node.value
            compiled = {
                name: call
                for name, call in compiled.items()
                if ast.unparse(call.func) == "re.compile"
            }
            for call in calls:
                if not isinstance(call.func, ast.Attribute):
                    continue
                owner, method = ast.unparse(call.func.value), call.func.attr
                source = (
                    call
                    if owner == "re" and method not in ("compile", "escape")
                    else compiled.get(owner)
                )
                if source is not None and isinstance(source.args[0], ast.Constant):
                    yield path.relative_to(REPOSITORY).as_posix(), with_flags(source), method


def with_flags(call: ast.Call) -> str:
    """The call's pattern with its flags written into it."""
    assert isinstance(call.args[0], ast.Constant)
    names = {"IGNORECASE": "i", "DOTALL": "s", "MULTILINE": "m"}
    flags = "".join(letter for name, letter in names.items() if name in ast.unparse(call))
    return f"(?{flags}){call.args[0].value}" if flags else str(call.args[0].value)


def test_no_regular_expression_takes_more_than_its_share_of_a_longer_text() -> None:
    found = sorted(set(expressions()))
    assert len(found) > 25
    for file, pattern, method in found:
        if GUARDED.get(pattern) != file:
            check_growth(file, pattern, method)


def check_growth(file: str, pattern: str, method: str) -> None:
    compiled = re.compile(pattern)
    anchored = method in ("match", "fullmatch")
    read = getattr(compiled, method) if anchored else (lambda text: compiled.sub("", text))
    literals = re.findall(r"[A-Za-z _<>=:/,()-]+", re.sub(r"\(\?\w+\)|\\.", " ", pattern))[:4]
    for head in dict.fromkeys(["", *literals]):
        for pump in dict.fromkeys([*PUMPS, *literals]):
            for tail in ("", "\0"):
                length = superlinear(read, head, pump, tail)
                assert length is None, (
                    f"{file}: {pattern} on {head!r} + {pump!r} * n + {tail!r} at {length}"
                )


READERS: dict[str, Callable[[str], Any]] = {
    "find_action": find_action,
    "clean_command": clean_command,
    "find_calls": find_calls,
    "parse_response": parse_response,
    "find_answer": find_answer,
    "exact": lambda text: exact(text, QUESTION),
    "read_result": read_result,
    "harmless": harmless,
    "clip": lambda text: clip(text, 1000),
    "babyai": lambda text: game(babyai).translate(text),  # type: ignore[attr-defined]
    "babaisai": lambda text: game(babaisai).translate(text),  # type: ignore[attr-defined]
    "crafter": lambda text: game(crafter).translate(text),  # type: ignore[attr-defined]
    "encoder": lambda text: encoder().prompt([{"role": "user", "content": text}]),
}
PIECES = (
    *PUMPS,
    *(
        "ACTION:",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<parameter=p>",
        "</parameter>",
        "</think>",
        "<think>",
    ),
    *("\\text{", "\\frac{1}{", "1\\,", "1 1/", "cm ", "^o", " 000"),
    *("''", "\\boxed{", "answer: ", "Do (", '{"name":', "<|im_end|>", "<|im_start|>system"),
    *("\U000f0000", "\N{SNOWMAN}", "√("),
)


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_more_than_its_share_of_a_longer_text(reader: str) -> None:
    read = READERS[reader]
    for head in ("", "ACTION: ", "<tool_call><function=f>") if reader != "encoder" else ("",):
        for piece in PIECES:
            length = superlinear(read, head, piece, "")
            assert length is None, f"{reader} on {head!r} + {piece!r} * n at {length} characters"


@pytest.mark.parametrize("pattern", [r"\s+x", r"\s*\s*x"])
def test_an_expression_that_takes_more_than_its_share_would_be_found(pattern: str) -> None:
    assert superlinear(re.compile(pattern).search, "", " ", "\0") is not None
