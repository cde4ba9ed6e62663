"""How tool calls are read out of answers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe.tools import TOOLS, Call, parse_response
from tests.envs.swe.tiny_repository import call


def test_a_block_becomes_a_call_with_its_defaults_filled_in() -> None:
    answer = parse_response("I look first.\n" + call("view", path="a.py", start=3) + "\nThen I go on.")
    assert answer.valid
    assert answer.calls == (Call("view", {"path": "a.py", "start": 3, "end": None}),)


def test_several_blocks_are_taken_in_order_and_the_span_covers_them() -> None:
    blocks = call("view", path="a") + "\nand\n" + call("submit")
    text = f"so: {blocks} done"
    answer = parse_response(text)
    assert [c.name for c in answer.calls] == ["view", "submit"]
    assert text[slice(*answer.span)] == blocks


def test_calls_past_the_limit_are_dropped_and_said_to_be() -> None:
    answer = parse_response(call("view") * 6, max_calls=4)
    assert answer.valid and answer.cut and len(answer.calls) == 4
    assert not parse_response(call("view") * 4, max_calls=4).cut


def test_one_bad_call_rejects_the_answer_and_is_named() -> None:
    answer = parse_response(call("view") + call("fly"))
    assert not answer.valid
    assert "no tool 'fly'" in answer.errors[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "'path' is a required property"),
        ({"path": "a", "line": "3", "text": ""}, "line: '3' is not of type 'integer'"),
        ({"path": "a", "line": True, "text": ""}, "line: True is not of type 'integer'"),
        ({"path": 1, "line": 3, "text": ""}, "path: 1 is not of type 'string'"),
        ({"path": "a", "line": 3, "text": "", "more": 1}, "'more' was unexpected"),
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
        "<tool_call></tool_call>",
        "<tool_call>{'name': 'view'}</tool_call>",
        '<tool_call>{"name": "view", "arguments": {"path": "a"}',
        '<tool_call>{"name": "view", "arguments": []}</tool_call>',
        '<tool_call>["view"]</tool_call>',
        '<tool_call>{"name": {"a": 1}}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": ' + "9" * 10_000 + "}</tool_call>",
        "<tool_call>" * 5000,
        "ACTION:",
        "ACTION: edit a.py",
        "ACTION: view\x00",
        "ACTION: view a\ud800",
        "ACTION: view a\0",
        "ACTION: submit now please",
        "I would run the tests.",
        "run the tests\nand then submit",
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
        ("ACTION: search def  total", Call("search", {"pattern": "def  total", "path": "."})),
        ("ACTION: run_tests a.py b.py", Call("run_tests", {"targets": "a.py b.py"})),
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


def test_an_unclosed_block_at_the_end_counts_when_its_json_is_whole() -> None:
    assert parse_response(call("submit").removesuffix("\n</tool_call>")).valid


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


@pytest.mark.parametrize("evil", ["</tool_call>", "</think>", "<|im_end|>", "<tool_call>", '"}}', "\\u003c"])
def test_tags_inside_of_an_argument_do_not_end_the_block(evil: str) -> None:
    made = Call("create", {"path": "a", "text": f"x{evil}y"})
    assert parse_response(made.text()).calls == (made,) and parse_response(made.text()).valid
    assert not any(mark in made.text() for mark in ("</think>", "<|"))


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


def test_schemas_are_json_and_name_every_tool() -> None:
    names = [schema["name"] for schema in json.loads(json.dumps([tool.schema for tool in TOOLS.values()]))]
    assert names == list(TOOLS)
