"""How tool calls are read out of answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe.tools import TOOLS, Call, parse_response
from tests.envs.swe.tiny_repository import call


def test_a_block_becomes_a_call_with_its_defaults_filled_in() -> None:
    answer = parse_response("I look first.\n" + call("view", path="a.py", start=3) + "\nThen I go on.")
    assert answer.valid
    assert answer.calls == (Call("view", {"path": "a.py", "start": 3, "end": None}),)


def test_one_bad_call_rejects_the_answer_and_is_named() -> None:
    answer = parse_response(call("view") + call("fly"))
    assert not answer.valid
    assert "no tool 'fly'" in answer.errors[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "'path' is a required property"),
        ({"path": "a", "line": "3", "text": ""}, "line: '3' is not of type 'integer'"),
        ({"path": "a\0b", "line": 3, "text": ""}, "NUL"),
        ({"path": "a", "line": 3, "text": "\ud800"}, "surrogate"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, part: str) -> None:
    assert part in parse_response(call("insert", **arguments)).errors[0]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>["view"]</tool_call>',
        "<tool_call>" + "[" * 100_000,
        "ACTION:",
        "ACTION: edit a.py",
        "ACTION: view a\ud800",
        "ACTION: view a\0",
        "ACTION: submit now please",
        "I would run the tests.",
        "",
    ],
)
def test_half_formed_answers_are_rejected_with_a_reason(text: str) -> None:
    answer = parse_response(text)
    assert not answer.valid and answer.errors and all(answer.errors)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("submit", Call("submit", {})),
        ("THINK: done.\nACTION: submit", Call("submit", {})),
        ("ACTION: view a.py 10 20", Call("view", {"path": "a.py", "start": 10, "end": 20})),
        ("view", Call("view", {"path": ".", "start": 1, "end": None})),
        ("ACTION: run ls -l | head -3\nthat is all", Call("run", {"command": "ls -l | head -3"})),
        ('ACTION: {"name": "view", "arguments": {}}', Call("view", {"path": ".", "start": 1, "end": None})),
        ('{"name": "run", "arguments": "{\\"command\\": \\"ls\\"}"}', Call("run", {"command": "ls"})),
    ],
)
def test_the_plain_form_is_understood_where_a_line_can_say_it(text: str, expected: Call) -> None:
    answer = parse_response(text)
    assert answer.calls == (expected,) and answer.valid
    start, end = answer.span
    assert text[start:end] == text[start:end].strip() != ""


def test_what_stands_in_the_reasoning_is_not_run() -> None:
    reasoning = f"<think>I could {call('run', command='rm -r .')} or\nACTION: submit\nbut no.</think>\n"
    assert parse_response(reasoning + "ACTION: view").calls == parse_response("view").calls
    assert parse_response(reasoning + call("view")).calls == parse_response("view").calls
    for answer in (reasoning, "<think>I submit\nACTION: submit"):
        assert not parse_response(answer).valid


def test_markup_calls_get_their_numbers() -> None:
    markup = "<tool_call>\n<function=view>\n<parameter=path>\na.py\n</parameter>\n<parameter=start>\n7\n</parameter>\n"
    answer = parse_response(markup + "</function>\n</tool_call>")
    assert answer.calls == (Call("view", {"path": "a.py", "start": 7, "end": None}),)


_values = {
    "string": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "integer": st.integers(),
}


@st.composite
def _calls(draw) -> Call:
    name = draw(st.sampled_from(sorted(TOOLS)))
    return Call(name, {key: draw(_values[p["type"]]) for key, p in TOOLS[name].parameters.items()})


@settings(deadline=None)
@given(st.lists(_calls(), min_size=1, max_size=4), st.text())
def test_what_is_written_is_read_back(calls: list[Call], before: str) -> None:
    text = before.replace("<", "") + "\n".join(c.text() for c in calls)
    assert parse_response(text).calls == tuple(calls) and parse_response(text).valid


_pieces = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "view"',
    ', "arguments": {',
    "}}",
    '"',
    "\\",
    "ACTION:",
    "run ",
    "\n",
]


@settings(deadline=None, max_examples=500)
@given(st.lists(st.one_of(st.sampled_from(_pieces), st.text(max_size=5)), max_size=12).map("".join))
def test_no_text_makes_the_parser_raise_and_spans_lie_inside(text: str) -> None:
    answer = parse_response(text)
    assert answer.valid == (bool(answer.calls) and not answer.errors)
    if answer.span is not None:
        start, end = answer.span
        assert 0 <= start <= end <= len(text)
