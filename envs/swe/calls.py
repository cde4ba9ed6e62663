"""Reads the calls of SWE and Harbor tools from a response.

Calls have the forms of `envs/tools/calls.py`. In a response without such a call, a plain line alone or after `ACTION:`
counts as one: `view setup.py 1 40`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.text_game import find_action
from envs.tools import calls as tool_calls
from envs.tools.calls import CLOSE, OPEN, decode, find_calls, read_call, reasoning_end, short
from envs.tools.schema import ArgumentCheck
from slime_verlog import read_yaml_mapping

_STRUCTURE = re.compile(r"<(?=[/|]|tool_call>|think>)")


@dataclass(frozen=True)
class ShellTool:
    """One tool of `tools.yaml`, which describes the fields."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    plain: Sequence[str] | None = None

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


TOOLS: Mapping[str, ShellTool] = {
    name: ShellTool(name, **tool)
    for name, tool in read_yaml_mapping(str(Path(__file__).with_name("tools.yaml")), "tools").items()
}


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
class Response(tool_calls.Calls):
    """As `envs.tools` finds them: calls in order, what was wrong, and the [start, end) of the asking text."""

    calls: tuple[Call, ...] = ()


def parse_response(text: str, max_calls: int = 4, tools: Mapping[str, ShellTool] = TOOLS) -> Response:
    """Read the calls of `tools` out of a response. Never raises; what cannot be read is an error in words."""
    found = find_calls(text, max_calls)
    if found.span is None:
        return _parse_plain(text, tools)
    checked = [_check_call(tools, call) for call in found.calls]
    errors = (*found.errors, *(c for c in checked if isinstance(c, str)))
    return Response(tuple(c for c in checked if isinstance(c, Call)), errors, found.span, found.cut)


def _parse_plain(text: str, tools: Mapping[str, ShellTool]) -> Response:
    begin = reasoning_end(text)
    if begin is None:
        return Response(errors=("the response ends inside of its reasoning",))
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
    return Response((result,), (), span) if isinstance(result, Call) else Response((), (result,), span)


def _read_line(tools: Mapping[str, ShellTool], line: str) -> Call | str:
    """Read `view setup.py 1 40`."""
    name, _, rest = line.partition(" ")
    if (tool := tools.get(name)) is None:
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
