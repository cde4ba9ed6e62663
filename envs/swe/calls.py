"""The tools of SWE tasks, and how calls of such tools are read from an answer.

Calls have the forms of `envs/tools/calls.py`, such as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. In an
answer without such a call, a plain line alone or after `ACTION:` counts as one: `view setup.py 1 40`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.text_game import find_action
from envs.tools.calls import CLOSE, OPEN, decode, find_calls, read_call, reasoning_end, short
from envs.tools.schema import ArgumentCheck, Schema

_STRUCTURE = re.compile(r"<(?=[/|]|tool_call>|think>)")


@dataclass(frozen=True)
class SWETool:
    """One tool. `plain` names the arguments that the plain form takes, in order; the last takes the rest of the
    line; None where the plain form cannot express the tool."""

    schema: Schema
    plain: tuple[str, ...] | None = None

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        return self.schema["function"]["parameters"]["properties"]

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the arguments that a call may leave out."""
        return {key: p["default"] for key, p in self.parameters.items() if "default" in p}

    @functools.cached_property
    def check(self) -> ArgumentCheck:
        return ArgumentCheck(self.schema)


def _text(description: str, **more: Any) -> Mapping[str, Any]:
    return {"type": "string", "description": description, **more}


def _number(description: str, **more: Any) -> Mapping[str, Any]:
    return {"type": "integer", "description": description, **more}


def _tool(
    description: str, parameters: Mapping[str, Mapping[str, Any]], plain: tuple[str, ...] | None = None
) -> tuple[str, Mapping[str, Any], tuple[str, ...] | None]:
    required = [key for key, parameter in parameters.items() if "default" not in parameter]
    return description, {"type": "object", "properties": parameters, "required": required}, plain


_PATH = _text("path inside the repository")
_TOOLS = {
    "view": _tool(
        "Show a text file with line numbers, or list a folder.",
        {
            "path": _text("file or folder inside the repository", default="."),
            "start": _number("first line to show, from 1", default=1),
            "end": _number("last line to show; without it, as many as fit", default=None, nullable=True),
        },
        ("path", "start", "end"),
    ),
    "search": _tool(
        "Find lines that match an extended regular expression (as grep -E does).",
        {"pattern": _text("what to look for"), "path": _text("file or folder to look in", default=".")},
        ("pattern",),
    ),
    "edit": _tool(
        "Replace a piece of a file. The old text must occur exactly once, spaces and line breaks included.",
        {"path": _PATH, "old": _text("text to be replaced"), "new": _text("text to put in its place")},
    ),
    "insert": _tool(
        "Insert lines after a line of a file.",
        {
            "path": _PATH,
            "line": _number("line after which the text goes; 0 for the top"),
            "text": _text("lines to insert"),
        },
    ),
    "create": _tool(
        "Write a whole file, new or in place of the old one.", {"path": _PATH, "text": _text("the file's content")}
    ),
    "run": _tool(
        "Run a shell command in the repository. There is no network, and time and memory are limited.",
        {"command": _text("what bash runs")},
        ("command",),
    ),
    "run_tests": _tool(
        "Run pytest on the repository as it is now.",
        {"targets": _text("files or test ids, separated by spaces; empty for all tests", default="")},
        ("targets",),
    ),
    "submit": _tool("Hand in the repository as it is now and end the task.", {}, ()),
}
TOOLS: Mapping[str, SWETool] = {
    name: SWETool(
        {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}, plain
    )
    for name, (description, parameters, plain) in _TOOLS.items()
}


def with_descriptions(descriptions: Mapping[str, str]) -> Mapping[str, SWETool]:
    """Some of the tools, described for another environment."""
    found = {}
    for name, text in descriptions.items():
        function = {**TOOLS[name].schema["function"], "description": text}
        found[name] = replace(TOOLS[name], schema={"type": "function", "function": function})
    return found


@dataclass(frozen=True)
class Call:
    """One well-formed call; every argument is present and of its type."""

    name: str
    arguments: Mapping[str, Any]

    def text(self) -> str:
        """The call as a Hermes block that holds only what differs from the defaults."""
        defaults = TOOLS[self.name].defaults
        given = {k: v for k, v in self.arguments.items() if k not in defaults or v != defaults[k]}
        body = json.dumps({"name": self.name, "arguments": given}, ensure_ascii=False)
        # Escaped, so that no tag or chat marker inside of an argument ends the block or the message.
        body = _STRUCTURE.sub(r"\\u003c", body)
        return f"{OPEN}\n{body}\n{CLOSE}"


@dataclass(frozen=True)
class Answer:
    """What an answer asks for: calls in order, what was wrong, and the [start, end) of the asking text."""

    calls: tuple[Call, ...]
    errors: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    cut: bool = False
    """Whether more calls followed than are taken per turn."""

    @property
    def valid(self) -> bool:
        """At least one call, and every call well formed."""
        return bool(self.calls) and not self.errors


def parse_answer(text: str, max_calls: int = 4, tools: Mapping[str, SWETool] = TOOLS) -> Answer:
    """Read the calls of `tools` out of an answer. Never raises; what cannot be read is an error in words."""
    found = find_calls(text, max_calls)
    if found.span is None:
        return _parse_plain(text, tools)
    checked = [_check_call(tools, call.name, call.arguments, call.as_text) for call in found.calls]
    calls = tuple(c for c in checked if isinstance(c, Call))
    errors = tuple(c for c in checked if isinstance(c, str))
    return Answer(calls, (*found.errors, *errors), found.span, found.cut)


def _parse_plain(text: str, tools: Mapping[str, SWETool]) -> Answer:
    begin = reasoning_end(text)
    if begin is None:
        return Answer((), ("the answer ends inside of its reasoning",))
    candidate, (start, _) = find_action(text[begin:])
    stripped = candidate.strip()
    offset = begin + start + len(candidate) - len(candidate.lstrip())
    if stripped.startswith("{"):
        value, end, error = decode(stripped)
        call = error or read_call(value)
        result = call if isinstance(call, str) else _check_call(tools, call.name, call.arguments)
        stripped = stripped[:end] if end else stripped
    else:
        line = stripped.split("\n", 1)[0].rstrip()
        result = _read_line(tools, line) if start > 0 or line == stripped else "no tool call was found"
        stripped = line
    span = (offset, offset + len(stripped))
    return Answer((result,), (), span) if isinstance(result, Call) else Answer((), (result,), span)


def _read_line(tools: Mapping[str, SWETool], line: str) -> Call | str:
    """Read `view setup.py 1 40`."""
    name, _, rest = line.partition(" ")
    spec = tools.get(name)
    if spec is None:
        return "no tool call was found"
    if spec.plain is None:
        return f"{name} needs a {OPEN} block; it cannot be written in one line"
    words = rest.split(None, len(spec.plain) - 1) if spec.plain else rest.split()
    if len(words) > len(spec.plain):
        return f"{name} takes no arguments"
    arguments = {key: word.strip() for key, word in zip(spec.plain, words, strict=False)}
    return _check_call(tools, name, arguments, as_text=True)


def _check_call(
    tools: Mapping[str, SWETool], name: str, arguments: Mapping[str, Any], as_text: bool = False
) -> Call | str:
    """Check a call against its tool; a string says what is wrong. `as_text`: numbers come as digits."""
    tool = tools.get(name)
    if tool is None:
        return f"there is no tool {short(name)}; there are {', '.join(tools)}"
    given = tool.check.convert(arguments) if as_text else dict(arguments)
    if error := tool.check(given):
        return error
    for key, value in given.items():
        if isinstance(value, str) and ("\0" in value or value.encode("utf-8", "ignore").decode() != value):
            return f"{name}: {key} holds a NUL character or half of a surrogate pair"
    return Call(name, {key: given.get(key, tool.defaults.get(key)) for key in tool.parameters})


def schemas(tools: Mapping[str, SWETool] = TOOLS) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the tools, as prompts show them."""
    return [tool.schema["function"] for tool in tools.values()]
