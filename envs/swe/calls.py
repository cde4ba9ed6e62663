"""Tool calls as the model writes them: what may be asked for, and how it is read out of an answer.

Calls are written as `envs/tools/calls.py` reads them, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
above all; where none stands, one plain line after `ACTION:` (or alone) is one too: `view setup.py 1 40`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.text_game import find_action
from envs.tools.calls import CLOSE, OPEN, decode, find_calls, read_call, reasoning_end, short

_STRUCTURE = re.compile(r"<(?=[/|]|tool_call>|think>)")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool."""

    type: type
    description: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class ToolSpec:
    """One tool. `plain` names the arguments that the plain form takes, in order; the last takes the rest of the
    line; None where the plain form cannot express the tool."""

    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    plain: tuple[str, ...] | None = None


_PATH = Parameter(str, "path inside the repository", required=True)

TOOLS: dict[str, ToolSpec] = {
    "view": ToolSpec(
        "Show a text file with line numbers, or list a folder.",
        {
            "path": Parameter(str, "file or folder inside the repository", "."),
            "start": Parameter(int, "first line to show, from 1", 1),
            "end": Parameter(int, "last line to show; without it, as many as fit"),
        },
        ("path", "start", "end"),
    ),
    "search": ToolSpec(
        "Find lines that match an extended regular expression (as grep -E does).",
        {
            "pattern": Parameter(str, "what to look for", required=True),
            "path": Parameter(str, "file or folder to look in", "."),
        },
        ("pattern",),
    ),
    "edit": ToolSpec(
        "Replace a piece of a file. The old text must occur exactly once, spaces and line breaks included.",
        {
            "path": _PATH,
            "old": Parameter(str, "text to be replaced", required=True),
            "new": Parameter(str, "text to put in its place", required=True),
        },
    ),
    "insert": ToolSpec(
        "Insert lines after a line of a file.",
        {
            "path": _PATH,
            "line": Parameter(int, "line after which the text goes; 0 for the top", required=True),
            "text": Parameter(str, "lines to insert", required=True),
        },
    ),
    "create": ToolSpec(
        "Write a whole file, new or in place of the old one.",
        {"path": _PATH, "text": Parameter(str, "the file's content", required=True)},
    ),
    "run": ToolSpec(
        "Run a shell command in the repository. There is no network, and time and memory are limited.",
        {"command": Parameter(str, "what bash runs", required=True)},
        ("command",),
    ),
    "run_tests": ToolSpec(
        "Run pytest on the repository as it is now.",
        {"targets": Parameter(str, "files or test ids, separated by spaces; empty for all tests", "")},
        ("targets",),
    ),
    "submit": ToolSpec("Hand in the repository as it is now and end the task.", {}, ()),
}


@dataclass(frozen=True)
class Call:
    """One well-formed call; every argument is present and of its type."""

    name: str
    arguments: Mapping[str, Any]

    def text(self) -> str:
        """The call as a Hermes block that holds only what differs from the defaults."""
        parameters = TOOLS[self.name].parameters
        given = {k: v for k, v in self.arguments.items() if parameters[k].required or v != parameters[k].default}
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


def parse_answer(text: str, max_calls: int = 4) -> Answer:
    """Read the calls out of an answer. Never raises; what cannot be read is an error in words."""
    found = find_calls(text, max_calls)
    if found.span is None:
        return _parse_plain(text)
    checked = [_check_call(call.name, call.arguments, call.as_text) for call in found.calls]
    calls = tuple(c for c in checked if isinstance(c, Call))
    errors = tuple(c for c in checked if isinstance(c, str))
    return Answer(calls, (*found.errors, *errors), found.span, found.cut)


def _parse_plain(text: str) -> Answer:
    begin = reasoning_end(text)
    if begin is None:
        return Answer((), ("the answer ends inside of its reasoning",))
    candidate, (start, _) = find_action(text[begin:])
    stripped = candidate.strip()
    offset = begin + start + len(candidate) - len(candidate.lstrip())
    if stripped.startswith("{"):
        value, end, error = decode(stripped)
        call = error or read_call(value)
        result = call if isinstance(call, str) else _check_call(call.name, call.arguments)
        stripped = stripped[:end] if end else stripped
    else:
        line = stripped.split("\n", 1)[0].rstrip()
        result = _read_line(line) if start > 0 or line == stripped else "no tool call was found"
        stripped = line
    span = (offset, offset + len(stripped))
    return Answer((result,), (), span) if isinstance(result, Call) else Answer((), (result,), span)


def _read_line(line: str) -> Call | str:
    """Read `view setup.py 1 40`."""
    name, _, rest = line.partition(" ")
    spec = TOOLS.get(name)
    if spec is None:
        return "no tool call was found"
    if spec.plain is None:
        return f"{name} needs a {OPEN} block; it cannot be written in one line"
    words = rest.split(None, len(spec.plain) - 1) if spec.plain else rest.split()
    if len(words) > len(spec.plain):
        return f"{name} takes no arguments"
    arguments = {key: word.strip() for key, word in zip(spec.plain, words, strict=False)}
    return _check_call(name, arguments, as_text=True)


def _check_call(name: str, arguments: Mapping[str, Any], as_text: bool = False) -> Call | str:
    """Check a call against its tool; a string says what is wrong. `as_text`: numbers come as digits."""
    spec = TOOLS.get(name)
    if spec is None:
        return f"there is no tool {short(name)}; there are {', '.join(TOOLS)}"
    if as_text:
        arguments = {key: _as_number(spec, key, value) for key, value in arguments.items()}
    return _check_arguments(name, spec, arguments)


def _as_number(spec: ToolSpec, key: str, value: str) -> str | int:
    wants_number = key in spec.parameters and spec.parameters[key].type is int
    return int(value) if wants_number and _WHOLE_NUMBER.fullmatch(value.strip()) else value


def _check_arguments(name: str, spec: ToolSpec, given: Mapping[str, Any]) -> Call | str:
    unknown = [key for key in given if key not in spec.parameters]
    if unknown:
        return f"{name} has no argument {short(unknown[0])}; it has {', '.join(spec.parameters) or 'none'}"
    arguments: dict[str, Any] = {}
    for key, parameter in spec.parameters.items():
        value = given.get(key, parameter.default)
        if value is None and not parameter.required:
            arguments[key] = parameter.default
        elif type(value) is not parameter.type:
            kind = "a string" if parameter.type is str else "a whole number"
            return f"{name}: {key} must be {kind}, got {short(value)}" if key in given else f"{name} needs {key}"
        elif isinstance(value, str) and (error := _check_text(value)):
            return f"{name}: {key} {error}"
        else:
            arguments[key] = value
    return Call(name, arguments)


def _check_text(value: str) -> str:
    if "\0" in value:
        return "holds a NUL character"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    return ""


def schemas() -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the tools, as chat templates and prompts show them."""
    names = {str: "string", int: "integer"}
    return [
        {
            "name": name,
            "description": spec.description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": names[p.type], "description": p.description} for key, p in spec.parameters.items()
                },
                "required": [key for key, p in spec.parameters.items() if p.required],
            },
        }
        for name, spec in TOOLS.items()
    ]
