"""The tools of SWE and Harbor tasks, and how their calls are read from an answer.

Calls have the forms of `envs/tools/calls.py`, such as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. In an
answer without such a call, a plain line alone or after `ACTION:` counts as one: `view setup.py 1 40`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.text_game import find_action
from envs.tools import calls as tool_calls
from envs.tools.calls import CLOSE, OPEN, decode, find_calls, read_call, reasoning_end, short
from envs.tools.schema import ArgumentCheck

_STRUCTURE = re.compile(r"<(?=[/|]|tool_call>|think>)")


@dataclass(frozen=True)
class ShellTool:
    """One tool. `plain` names the arguments that the plain form takes, in order; the last takes the rest of the
    line; None where the plain form cannot express the tool."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    plain: tuple[str, ...] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema, as prompts show it."""
        required = [key for key, parameter in self.parameters.items() if "default" not in parameter]
        parameters = {"type": "object", "properties": self.parameters, "required": required}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the arguments that a call may leave out."""
        return {key: p["default"] for key, p in self.parameters.items() if "default" in p}

    @functools.cached_property
    def check(self) -> ArgumentCheck:
        return ArgumentCheck({"type": "function", "function": self.schema})

    def read(self, arguments: Mapping[str, Any], as_text: bool = False) -> Call | str:
        """A call with these arguments, or what is wrong with them. `as_text`: numbers come as digits."""
        given = self.check.convert(arguments) if as_text else dict(arguments)
        if error := self.check(given):
            return error
        for key, value in given.items():
            if isinstance(value, str) and ("\0" in value or value.encode("utf-8", "ignore").decode() != value):
                return f"{self.name}: {key} holds a NUL character or half of a surrogate pair"
        return Call(self.name, {key: given.get(key, self.defaults.get(key)) for key in self.parameters})


def _text(description: str, **more: Any) -> Mapping[str, Any]:
    return {"type": "string", "description": description, **more}


def _number(description: str, **more: Any) -> Mapping[str, Any]:
    return {"type": "integer", "description": description, **more}


_PATH = _text("path inside the repository")
_ALL = (
    ShellTool(
        "view",
        "Show a text file with line numbers, or list a folder.",
        {
            "path": _text("file or folder inside the repository", default="."),
            "start": _number("first line to show, from 1", default=1),
            "end": _number("last line to show; without it, as many as fit", default=None, nullable=True),
        },
        ("path", "start", "end"),
    ),
    ShellTool(
        "search",
        "Find lines that match an extended regular expression (as grep -E does).",
        {"pattern": _text("what to look for"), "path": _text("file or folder to look in", default=".")},
        ("pattern",),
    ),
    ShellTool(
        "edit",
        "Replace a piece of a file. The old text must occur exactly once, spaces and line breaks included.",
        {"path": _PATH, "old": _text("text to be replaced"), "new": _text("text to put in its place")},
    ),
    ShellTool(
        "insert",
        "Insert lines after a line of a file.",
        {
            "path": _PATH,
            "line": _number("line after which the text goes; 0 for the top"),
            "text": _text("lines to insert"),
        },
    ),
    ShellTool(
        "create",
        "Write a whole file, new or in place of the old one.",
        {"path": _PATH, "text": _text("the file's content")},
    ),
    ShellTool(
        "run",
        "Run a shell command in the repository. There is no network, and time and memory are limited.",
        {"command": _text("what bash runs")},
        ("command",),
    ),
    ShellTool(
        "run_tests",
        "Run pytest on the repository as it is now.",
        {"targets": _text("files or test ids, separated by spaces; empty for all tests", default="")},
        ("targets",),
    ),
    ShellTool("submit", "Hand in the repository as it is now and end the task.", {}, ()),
)
TOOLS: Mapping[str, ShellTool] = {tool.name: tool for tool in _ALL}


class Call(tool_calls.Call):
    """One well-formed call; every argument is present and of its type."""

    def text(self) -> str:
        """The call as a Hermes block that holds only what differs from the defaults."""
        defaults = TOOLS[self.name].defaults
        given = {k: v for k, v in self.arguments.items() if k not in defaults or v != defaults[k]}
        body = json.dumps({"name": self.name, "arguments": given}, ensure_ascii=False)
        # Escaped, so that no tag or chat marker inside of an argument ends the block or the message.
        body = _STRUCTURE.sub(r"\\u003c", body)
        return f"{OPEN}\n{body}\n{CLOSE}"


@dataclass(frozen=True)
class Answer(tool_calls.Calls):
    """As `envs.tools` finds them: calls in order, what was wrong, and the [start, end) of the asking text."""

    calls: tuple[Call, ...] = ()


def parse_answer(text: str, max_calls: int = 4, tools: Mapping[str, ShellTool] = TOOLS) -> Answer:
    """Read the calls of `tools` out of an answer. Never raises; what cannot be read is an error in words."""
    found = find_calls(text, max_calls)
    if found.span is None:
        return _parse_plain(text, tools)
    checked = [_check_call(tools, call) for call in found.calls]
    calls = tuple(c for c in checked if isinstance(c, Call))
    errors = tuple(c for c in checked if isinstance(c, str))
    return Answer(calls, (*found.errors, *errors), found.span, found.cut)


def _parse_plain(text: str, tools: Mapping[str, ShellTool]) -> Answer:
    begin = reasoning_end(text)
    if begin is None:
        return Answer(errors=("the answer ends inside of its reasoning",))
    candidate, (start, _) = find_action(text[begin:])
    stripped = candidate.strip()
    offset = begin + start + len(candidate) - len(candidate.lstrip())
    if stripped.startswith("{"):
        value, end, error = decode(stripped)
        call = error or read_call(value)
        result = call if isinstance(call, str) else _check_call(tools, call)
        stripped = stripped[:end] if end else stripped
    else:
        line = stripped.split("\n", 1)[0].rstrip()
        result = _read_line(tools, line) if start > 0 or line == stripped else "no tool call was found"
        stripped = line
    span = (offset, offset + len(stripped))
    return Answer((result,), (), span) if isinstance(result, Call) else Answer((), (result,), span)


def _read_line(tools: Mapping[str, ShellTool], line: str) -> Call | str:
    """Read `view setup.py 1 40`."""
    name, _, rest = line.partition(" ")
    tool = tools.get(name)
    if tool is None:
        return "no tool call was found"
    if tool.plain is None:
        return f"{name} needs a {OPEN} block; it cannot be written in one line"
    words = rest.split(None, len(tool.plain) - 1) if tool.plain else rest.split()
    if len(words) > len(tool.plain):
        return f"{name} takes no arguments"
    return tool.read({key: word.strip() for key, word in zip(tool.plain, words, strict=False)}, as_text=True)


def _check_call(tools: Mapping[str, ShellTool], call: tool_calls.Call) -> Call | str:
    if call.name not in tools:
        return f"there is no tool {short(call.name)}; there are {', '.join(tools)}"
    return tools[call.name].read(call.arguments, call.as_text)


def schemas(tools: Mapping[str, ShellTool] = TOOLS) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the tools, as prompts show them."""
    return [tool.schema for tool in tools.values()]
