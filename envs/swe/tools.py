"""The tools of SWE and Harbor: reads their calls from a response, and executes them.

Calls have the forms of `envs/calls.py`. In a response without such a call, a plain line alone or
after `ACTION:` counts as one: `view setup.py 1 40`. Each tool takes the episode's workbench and its
checked arguments, and returns text for the model. Invariants: a result has at most `output_chars`
characters, says when it was cut, and contains no markup of chats.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import calls as tool_calls
from envs.base import timed
from envs.call_form import CallForm
from envs.calls import CLOSE, OPEN, find_calls, read_call, reasoning_end
from envs.json_text import decode, short
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import Outcome
from envs.swe.sandbox.workspace import ToolFailure, Workspace
from envs.text_game import find_action
from envs.tools.results import ToolResult, clip, encodable
from envs.tools.schema import ArgumentCheck
from slime_verlog import read_yaml_mapping

_STRUCTURE = re.compile(r"<(?=[/|]|tool_call>|think>)")
"""The brackets that `Call.text` escapes: of tags, and of chat markers such as `<|im_end|>`."""
_MARKUP = re.compile(
    r"<(?=/?tool_(?:call|response)>|\|[A-Za-z0-9_▁]{1,64}\|>|｜[^｜\n]{1,64}｜>|/?s>|/?think>)"
)
"""The brackets of tags and chat markers in what tools return; `harmless` puts a space after
each."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
"""Escape sequences of terminals, and control characters other than tab and newline, which
`harmless` removes."""
MAX_COMMAND_BYTES = 32 << 10
"""Longest command of `run`, and longest list of targets of `run_tests`."""
_VIEW_LINES = 200
"""Lines that `view` shows if the call names no last one."""
_SHOWN = ("path", "pattern", "command", "targets", "start", "end")
"""Arguments that name a call where its result is shown."""
_STOPPED = {
    "time": "stopped: it ran past its time limit",
    "memory": "stopped: its processes used more memory than they may",
    "disk": "stopped: the files grew larger than they may; delete what is not needed",
    "output": "stopped: it printed too much",
}
"""How the model is told why a command was stopped, by `Outcome.stopped`."""
_GREP = (
    'set -o pipefail; grep -rnIE --exclude-dir=.git --exclude-dir=__pycache__ -m 50 -e "$1" -- "$2" '
    "| LC_ALL=C sort -s -t: -k1,1"
)
"""Sorted, because grep follows the order of the disk, which differs from copy to copy."""


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
        """A call with these arguments, or what is wrong with them. `as_text`: numbers come as
        digits."""
        given = self.check.convert(arguments) if as_text else dict(arguments)
        if error := self.check(given):
            return error
        for key, value in given.items():
            if isinstance(value, str) and (
                "\0" in value or value.encode("utf-8", "ignore").decode() != value
            ):
                return f"{self.name}: {key} holds a NUL character or half of a surrogate pair"
        return Call(
            self.name, {key: given.get(key, self.defaults.get(key)) for key in self.parameters}
        )


TOOLS: Mapping[str, ShellTool] = {
    name: ShellTool(name, **tool)
    for name, tool in read_yaml_mapping(
        str(Path(__file__).with_name("tools.yaml")), "tools"
    ).items()
}


class Call(tool_calls.Call):
    """One well-formed call; every argument is present and of its type."""

    def text(self) -> str:
        """The call as a Hermes block that holds only what differs from the defaults."""
        defaults = TOOLS[self.name].defaults
        given = {k: v for k, v in self.arguments.items() if k not in defaults or v != defaults[k]}
        body = json.dumps({"name": self.name, "arguments": given}, ensure_ascii=False)
        # Escaped, so that no tag or chat marker inside of an argument ends the block or the
        # message.
        body = _STRUCTURE.sub(r"\\u003c", body)
        return f"{OPEN}\n{body}\n{CLOSE}"


@dataclass(frozen=True)
class Response(tool_calls.Calls):
    """As `envs.tools` finds them: calls in order, what was wrong, and the [start, end) of the
    asking text."""

    calls: tuple[Call, ...] = ()


def parse_response(
    text: str,
    max_calls: int = 4,
    tools: Mapping[str, ShellTool] = TOOLS,
    form: CallForm | None = None,
) -> Response:
    """Read the calls of `tools` out of a response; `form`: as `find_calls`.

    Never raises; what cannot be read is an error in words.
    """
    found = find_calls(text, max_calls, form)
    if found.span is None or found.foreign:
        return _parse_plain(text, tools, form)
    checked = [_check_call(tools, call) for call in found.calls]
    errors = (*found.errors, *(c for c in checked if isinstance(c, str)))
    return Response(tuple(c for c in checked if isinstance(c, Call)), errors, found.span, found.cut)


def _parse_plain(text: str, tools: Mapping[str, ShellTool], form: CallForm | None) -> Response:
    begin = reasoning_end(text, form)
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
        result = (
            _read_line(tools, line) if start > 0 or line == stripped else "no tool call was found"
        )
        stripped = line
    span = (offset, offset + len(stripped))
    return (
        Response((result,), (), span) if isinstance(result, Call) else Response((), (result,), span)
    )


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
    return tool.read(
        {key: word.strip() for key, word in zip(tool.plain, words, strict=False)}, as_text=True
    )


def _check_call(tools: Mapping[str, ShellTool], call: tool_calls.Call) -> Call | str:
    if call.name not in tools:
        return f"there is no tool {short(call.name)}; there are {', '.join(tools)}"
    return tools[call.name].read(call.arguments, call.as_text)


@dataclass(frozen=True)
class Workbench:
    """What tools act on."""

    workspace: Workspace
    sandbox: Sandbox
    output_chars: int = 6000
    test_seconds: float = 120.0
    test_args: tuple[str, ...] = ()
    deadline: float = math.inf
    """`time.monotonic()` at which the turn's time is used up; its commands share it."""

    def run(self, argv: Sequence[str], seconds: float) -> Outcome:
        """Run a command for at most `seconds`; raises ToolFailure past the turn's deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise ToolFailure("the time for this turn is used up; call it again in the next turn")
        return self.sandbox.run(argv, seconds=min(seconds, left))


def execute(bench: Workbench, call: Call) -> ToolResult:
    """Run one call. What the agent got wrong comes back as text; only a broken machine raises."""
    try:
        text = _FUNCTIONS[call.name](bench, **call.arguments)
        failed = False
    except ToolFailure as failure:
        text = f"error: {failure}"
        failed = True
    return ToolResult(clip(harmless(text), bench.output_chars), failed=failed)


def execute_all(bench: Workbench, calls: Iterable[Call]) -> tuple[str, int, bool]:
    """Run the calls in order up to a submit: (what to show, how many failed, whether submitted)."""
    shown = []
    failures = 0
    for number, call in enumerate(calls, 1):
        if call.name == "submit":
            return "\n\n".join([*shown, f"[{number}] submit"]), failures, True
        with timed(f"tool {call.name}"):
            result = execute(bench, call)
        failures += result.failed
        defaults = TOOLS[call.name].defaults
        words = [
            v for k, v in call.arguments.items() if k in _SHOWN and v not in (None, defaults.get(k))
        ]
        title = clip(
            harmless(" ; ".join(" ".join([call.name, *map(str, words)]).splitlines())), 200
        )
        shown.append(f"[{number}] {title}\n{result.text}")
    return "\n\n".join(shown), failures, False


def _view(bench: Workbench, path: str, start: int, end: int | None) -> str:
    if os.path.isdir(bench.workspace.locate(path)):
        return "\n".join(bench.workspace.entries(path)) or "(empty folder)"
    lines = bench.workspace.read(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    first = max(start, 1)
    last = min(len(lines), first + _VIEW_LINES - 1 if end is None else end)
    if first > last:
        raise ToolFailure(
            f"{path} has {len(lines)} lines; there is none from {start} to {end or 'the end'}"
        )
    shown = list[str]()
    room = bench.output_chars - 200
    for number in range(first, last + 1):
        line = f"{number:>5}  {lines[number - 1]}"
        room -= len(line) + 1
        if shown and room < 0:
            break
        shown.append(line)
    last = first + len(shown) - 1
    return "\n".join(shown) + (
        "" if last == len(lines) else f"\n(lines {first} to {last} of {len(lines)})"
    )


def _search(bench: Workbench, pattern: str, path: str) -> str:
    real = bench.workspace.locate(path)
    if len(pattern) > 1000:
        raise ToolFailure("the pattern is longer than 1000 characters")
    target = real.relative_to(bench.workspace.tree).as_posix()
    outcome = bench.run(
        ["bash", "-c", _GREP, "grep", pattern, target], bench.sandbox.limits.seconds
    )
    if outcome.stopped:
        return _with_status(outcome)
    if outcome.returncode == 1 and not outcome.output:
        return "no line matches"
    return re.sub(r"^\./", "", outcome.output, flags=re.MULTILINE).rstrip("\n")


def _edit(bench: Workbench, path: str, old: str, new: str) -> str:
    text = bench.workspace.read(path)
    old = _line_ends_of(text, old)
    new = _line_ends_of(text, new)
    if not old:
        raise ToolFailure("old is empty; use insert or create")
    found = text.count(old)
    if found != 1:
        raise ToolFailure(f"old occurs {found} times in {path}; it must occur exactly once")
    bench.workspace.write(path, text.replace(old, new))
    line = text[: text.index(old)].count("\n") + 1
    return f"{path} changed at line {line}"


def _insert(bench: Workbench, path: str, line: int, text: str) -> str:
    before = bench.workspace.read(path)
    lines = list(io.StringIO(before, newline="\n"))
    if not 0 <= line <= len(lines):
        raise ToolFailure(f"{path} has {len(lines)} lines; line must be between 0 and {len(lines)}")
    added = text.removesuffix("\n") + "\n"
    if line == len(lines) and before and not before.endswith("\n"):
        lines[-1] += _line_ends_of(before, "\n")
    bench.workspace.write(
        path, "".join([*lines[:line], _line_ends_of(before, added), *lines[line:]])
    )
    return f"{path}: {len(added.splitlines())} lines inserted after line {line}"


def _line_ends_of(text: str, piece: str) -> str:
    """`piece` with the line ends of `text`: results never show the agent a carriage return."""
    return piece.replace("\n", "\r\n") if "\r\n" in text and "\r" not in piece else piece


def _create(bench: Workbench, path: str, text: str) -> str:
    bench.workspace.write(path, text)
    return f"{path} written, {len(text.splitlines())} lines"


def _run(bench: Workbench, command: str) -> str:
    if len(command.encode()) > MAX_COMMAND_BYTES:
        raise ToolFailure(
            f"the command is longer than {MAX_COMMAND_BYTES >> 10} KiB; write a file with create "
            "first"
        )
    return _with_status(bench.run(["bash", "-c", command], bench.sandbox.limits.seconds))


def _run_tests(bench: Workbench, targets: str) -> str:
    if len(targets.encode()) > MAX_COMMAND_BYTES:
        raise ToolFailure("too many targets; name a folder instead")
    try:
        words = shlex.split(targets)
    except ValueError as error:
        raise ToolFailure(f"targets cannot be read: {error}") from error
    python = str(bench.sandbox.python)
    # As the judge does: options of the repository may need plugins that are off here.
    fixed = ["-q", "--color=no", "-p", "no:cacheprovider", "-o", "addopts="]
    outcome = bench.run(
        [python, "-B", "-m", "pytest", *fixed, *bench.test_args, *words], bench.test_seconds
    )
    # How long the tests took says nothing about them, and would differ when the episode is
    # replayed.
    return re.sub(r" in \d+\.\d+s( \(\d[\d:]*\))?", "", _with_status(outcome))


def _with_status(outcome: Outcome) -> str:
    status = _STOPPED.get(outcome.stopped, f"exit status {outcome.returncode}")
    return f"{outcome.output.rstrip()}\n({status})".lstrip("\n")


_FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "view": _view,
    "search": _search,
    "edit": _edit,
    "insert": _insert,
    "create": _create,
    "run": _run,
    "run_tests": _run_tests,
}


def harmless(text: str) -> str:
    """Take the meaning from what a template, tokenizer or terminal would read as structure.

    Chat markers such as `<|im_end|>` and tool tags get a space after the bracket; control
    characters other than tab and newline go. Bytes of a file name that are not UTF-8 become
    question marks.
    """
    return _CONTROL.sub("", _MARKUP.sub("< ", encodable(text).replace("\r\n", "\n")))
