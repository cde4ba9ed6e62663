"""Reading tool calls out of answers: every way of writing them, and everything that can be wrong
with one."""

import json

import pytest

from envs.call_form import MARKUP, CallForm
from envs.calls import find_calls

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
)
WAYS = {
    "hermes": HERMES,
    "hermes without an end tag": HERMES.removesuffix("</tool_call>"),
    "after reasoning": "<think>\nI could <tool_call> now\n</think>\n\nLet me add.\n" + HERMES,
    "reasoning that the header opened": "hm, adding\n</think>\n\n" + HERMES,
    "arguments as a string": '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
    "openai": '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}',
    "bare": '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]',
    "fenced": '```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n',
}


@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_call_is_read(way: str) -> None:
    found = find_calls(WAYS[way])
    assert found.valid and not found.cut
    assert [(c.name, dict(c.arguments)) for c in found.calls] == [("add", {"a": 1, "b": 2})]


def test_markup_calls_keep_their_arguments_as_text() -> None:
    found = find_calls("I add.\n" + CODER)
    assert found.valid and found.calls[0].as_text
    assert found.calls[0].arguments == {"a": "1", "b": "2"}
    body = "def f():\n    return '<tool>'"
    code = f"<tool_call><function=run><parameter=code>\n{body}\n</parameter></function></tool_call>"
    assert find_calls(code).calls[0].arguments == {"code": body}


def test_a_call_at_any_depth_of_nesting_is_read_or_explained() -> None:
    for depth in range(900, 1010):
        text = (
            '<tool_call>{"name": "add", "arguments": {"a": '
            + "[" * depth
            + "]" * depth
            + "}}</tool_call>"
        )
        found = find_calls(text)
        assert found.valid or "nested too deep" in found.errors[0]
    assert not found.valid


@pytest.mark.parametrize(
    "inner", ["<tool_call>", "</tool_call>", "</think>", "<tool_call>{}</tool_call> </function>"]
)
@pytest.mark.parametrize("way", ["tags", "tags without an end", "bare", "after reasoning"])
def test_tags_inside_an_argument_belong_to_the_argument(inner: str, way: str) -> None:
    body = json.dumps({"name": "add", "arguments": {"a": f"x {inner} y", "b": inner}})
    text = {
        "tags": f"Now: <tool_call>\n{body}\n</tool_call>",
        "tags without an end": f"<tool_call>{body}",
        "bare": body,
        "after reasoning": f"<think>hm</think><tool_call>{body}</tool_call>",
    }[way]
    found = find_calls(text)
    assert found.valid and not found.cut, found.errors
    assert [(c.name, dict(c.arguments)) for c in found.calls] == [
        ("add", {"a": f"x {inner} y", "b": inner})
    ]
    assert text[slice(*found.span)].endswith(("}", "</tool_call>"))
    twice = find_calls(f"<tool_call>{body}</tool_call>\n<tool_call>{body}</tool_call> bye")
    assert len(twice.calls) == 2 and not twice.errors


def test_reasoning_that_mentions_a_tag_is_still_reasoning() -> None:
    found = find_calls("I could write <tool_call> now, or {</think>" + HERMES)
    assert found.valid and len(found.calls) == 1


@pytest.mark.parametrize("call", [HERMES, '{"name": "add", "arguments": {"a": 1, "b": 2}}'])
def test_no_call_inside_of_any_block_of_reasoning_is_made(call: str) -> None:
    for text in (
        f"<think>a</think>\n<think>{call}</think>",
        f"<think>a</think>{call}</think> so",
        f"</think><think>{call}",
    ):
        found = find_calls(text)
        assert not found.calls and not found.errors
    assert len(find_calls(f"<think>a</think>\n<think>b</think>{call}").calls) == 1


def test_several_calls_keep_their_order_and_the_span_covers_them() -> None:
    text = f"First this.\n{HERMES}\n{HERMES.replace('add', 'pay')}\nThat is all."
    found = find_calls(text)
    assert [c.name for c in found.calls] == ["add", "pay"]
    start, end = found.span
    assert text[start:end] == f"{HERMES}\n{HERMES.replace('add', 'pay')}"
    both = '{"name": "a", "arguments": {}}; {"name": "b", "parameters": {}}'
    assert [c.name for c in find_calls(both).calls] == ["a", "b"]


def test_more_calls_than_allowed_are_reported() -> None:
    assert find_calls(HERMES * 3, limit=2).cut
    assert not find_calls(HERMES * 2, limit=2).cut
    assert find_calls("[" + ", ".join(['{"name": "a", "arguments": {}}'] * 3) + "]", limit=2).cut


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "after the call"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>',
            "key 'a' appears twice",
        ),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}</tool_call>',
            "not JSON",
        ),
        (CODER.replace("=b>", "=a>"), "the argument 'a' twice"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        (
            '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>",
            "nested too deep",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 10_000 + "}}</tool_call>",
            "can be read",
        ),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", "has no </function>"),
    ],
)
def test_a_broken_call_gives_an_error_message(text: str, words: str) -> None:
    found = find_calls(text)
    assert not found.valid and found.span is not None
    assert words in "; ".join(found.errors)


@pytest.mark.parametrize("arguments", ["null", '""', "{}"])
def test_a_call_without_arguments_may_say_so_in_any_way(arguments: str) -> None:
    found = find_calls(f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>')
    assert found.valid and found.calls[0].arguments == {}


@pytest.mark.parametrize(
    "text",
    [
        "I add.\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
        '[TOOL_CALLS]add[ARGS]{"a": 2}',
        "[add(a=2)]",
        'I add.\n{"name": "add", "arguments": {"a": 2}}',
        '<|tool_call_begin|>add:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>',
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2}\n```<｜tool▁call▁end｜>',
    ],
)
def test_a_call_in_a_form_that_is_not_known_is_told_and_is_no_final_answer(text: str) -> None:
    found = find_calls(text, form=MARKUP)
    assert not found.calls and found.foreign and "a call has the form" in found.errors[0]


def test_a_template_form_is_read_with_its_section_and_ids_and_only_where_it_is_given() -> None:
    section = ("<|calls|>", "<|/calls|>")
    form = CallForm("<|begin|>functions.", ":0<|args|>", "<|end|>", section=section)
    add = '<|begin|>functions.add:3<|args|>{"a": "</think>"}<|end|>'
    text = f"Now: <|calls|>{add}<|begin|>functions.look:4<|args|>{{}}<|end|>"
    found = find_calls(f"{text}<|/calls|> so", form=form)
    assert not find_calls(f"{text}<|/calls|> so", form=MARKUP).calls
    identities = [(call.name, call.identity) for call in found.calls]
    assert identities == [("add", "functions.add:3"), ("look", "functions.look:4")]
    assert f"{text}<|/calls|>"[slice(*found.span)] == f"{text}<|/calls|>".removeprefix("Now: ")
    for broken in (text.replace("{}", "{"), text.replace("functions.", "f.")):
        assert find_calls(broken, form=form).errors
