"""Finds tool calls in a model's response; a call that cannot be read becomes an error message for the model.

Three forms are accepted: JSON between `<tool_call>` tags (Hermes, Qwen), `<function=...>` markup between the same tags
(Qwen3-Coder, Qwen3.5), and a response that is only JSON (Llama, Mistral). Broken JSON is not repaired, because a policy
that is rewarded for it learns to write it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_REASONING_START, _REASONING_END = "<think>", "</think>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")
_FENCES = ("```json", "```tool_call", "```")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>")
_SEPARATOR = re.compile(r"[\s;,]*")
_CLOSED = re.compile(rf"\s*(?:{CLOSE}|{OPEN}|\Z)")
"""What must follow a call: a tag, or the end of the text."""
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_FORM = '{"name": ..., "arguments": {...}}'
_UNCLOSED = f"after the call comes something other than {CLOSE}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members; equal keys are refused."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(twice)} appears twice in one object")
    return members


# Raw line breaks inside strings are accepted: they are unambiguous and common in code.
_decoder = json.JSONDecoder(strict=False, parse_constant=_no_constant, object_pairs_hook=_distinct)


@dataclass(frozen=True)
class Call:
    """One readable call."""

    name: str
    arguments: Mapping[str, Any]
    as_text: bool = False
    """The call was markup, so all its values are still strings."""


@dataclass(frozen=True)
class Calls:
    """The calls of one response, and the errors in calls that cannot be read, each in order of appearance."""

    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    """Characters [start, end) from the first to the last call; None if the response has none."""
    cut: bool = False
    """There were more calls than `limit`."""

    @property
    def valid(self) -> bool:
        """At least one call, and every call readable."""
        return bool(self.calls) and not self.errors


def find_calls(text: str, limit: int = 8) -> Calls:
    """Find the calls after a response's reasoning; tags inside a call's string belong to it. Never raises."""
    start = reasoning_end(text)
    if start is None:
        return Calls()
    position = first = end = text.find(OPEN, start)
    if first < 0:
        return _bare(text, start, limit)
    if _unwrapped(text[start:].strip()).startswith(("{", "[")):
        bare = _bare(text, start, limit)
        if bare.valid:
            return bare
    found: list[Call | str] = []
    while position >= 0 and len(found) < limit:
        block, read = _block(text, position + len(OPEN))
        found.append(block)
        close, following = text.find(CLOSE, read), text.find(OPEN, read)
        # The end tag may be missing before the next call or the end of the text.
        if close >= 0 and not 0 <= following < close:
            end = close + len(CLOSE)
        else:
            end = following if following >= 0 else len(text)
        position = following
    return _collected(found, (first, end), cut=position >= 0)


def reasoning_end(text: str) -> int | None:
    """Return the position after the last block of reasoning; None if reasoning never ends."""
    position = 0
    while True:
        rest = text[position:]
        end, reasons = rest.find(_REASONING_END), rest.lstrip().startswith(_REASONING_START)
        if end < 0:
            return None if reasons else position
        if not reasons and _inside_json(rest, end):
            return position
        position += end + len(_REASONING_END)


def _inside_json(text: str, position: int) -> bool:
    """Return whether `position` is inside the JSON of a call or of a bare response, so inside one of its strings."""
    end, is_bare = 0, text.lstrip().startswith(("{", "["))
    while is_bare or (end := text.find(OPEN, end, position)) >= 0:
        _, end, error = decode(text, end if is_bare else end + len(OPEN))
        if error or end > position:
            return not error
        is_bare = False
    return False


def _block(text: str, start: int) -> tuple[Call | str, int]:
    """Return the call after a tag, and where its text ends; `start` if that is unknown."""
    if head := _FUNCTION.match(text, start):
        return _markup(text, head, start)
    value, end, error = decode(text, start)
    if error:
        return error, start
    return read_call(value) if _CLOSED.match(text, end) else _UNCLOSED, end


def _markup(text: str, head: re.Match[str], start: int) -> tuple[Call | str, int]:
    """Return the call in `<function=name><parameter=key>value</parameter></function>`, and where its text ends."""
    end = text.find(_FUNCTION_END, head.end())
    if end < 0:
        return f"the call of {short(head[1])} has no {_FUNCTION_END}", start
    *pieces, rest = text[head.end() : end].split(_PARAMETER_END)
    name, arguments, end = short(head[1]), dict[str, Any](), end + len(_FUNCTION_END)
    for piece in pieces:
        parameter = _PARAMETER.match(piece)
        if parameter is None:
            return f"the call of {name} holds something other than <parameter=name>value{_PARAMETER_END}", end
        if parameter[1] in arguments:
            return f"the call of {name} gives the argument {short(parameter[1])} twice", end
        arguments[parameter[1]] = piece[parameter.end() :].removeprefix("\n").removesuffix("\n")
    if rest.strip():
        return f"the call of {name} holds something after its last {_PARAMETER_END}", end
    call = _checked(Call(head[1], arguments, as_text=True))
    return call if isinstance(call, str) or _CLOSED.match(text, end) else _UNCLOSED, end


def _bare(text: str, start: int, limit: int) -> Calls:
    """Calls in a response that is only JSON: an object, a list of objects, or several objects in sequence."""
    body = text[start:]
    content = _unwrapped(body.strip())
    if not content.lstrip().startswith(("{", "[")):
        return Calls()
    span = (start + len(body) - len(body.lstrip()), start + len(body.rstrip()))
    values, error, position = list[Any](), "", 0
    while position < len(content) and len(values) <= limit and not error:
        value, end, error = decode(content, position)
        if not error:
            values += value if isinstance(value, list) else [value]
            separator = _SEPARATOR.match(content, end)
            position = separator.end() if separator is not None else end
    inner = [call for call in map(_unpacked, values) if isinstance(call, dict)]
    if not any("name" in call and ("arguments" in call or "parameters" in call) for call in inner):
        # JSON without a tool's name is a final answer; broken JSON that starts like a call is a broken call.
        return Calls(errors=(error,), span=span) if error and re.match(r'[\[\s]*\{\s*"name"', content) else Calls()
    found: list[Call | str] = [read_call(value) for value in values[:limit]]
    return _collected(found + [error] * bool(error and len(values) <= limit), span, cut=len(values) > limit)


def _unwrapped(body: str) -> str:
    """Return the response without a leading marker or a code fence around all of it."""
    for marker in _MARKERS:
        body = body.removeprefix(marker)
    fence = next((f for f in _FENCES if body.startswith(f)), None)
    if fence is not None and body.endswith("```") and len(body) >= len(fence) + 3:
        body = body[len(fence) : -3]
    return body.strip()


def _unpacked(value: Any) -> Any:
    """Return what is inside of `{"function": {...}}`, OpenAI's form."""
    return value["function"] if isinstance(value, dict) and isinstance(value.get("function"), dict) else value


def _collected(found: list[Call | str], span: tuple[int, int], cut: bool) -> Calls:
    calls = tuple(item for item in found if isinstance(item, Call))
    return Calls(calls, tuple(item for item in found if isinstance(item, str)), span, cut)


def decode(text: str, start: int = 0) -> tuple[Any, int, str]:
    """Read one JSON value that begins at `start` or after white space: (value, where it ends, error or "")."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _decoder.raw_decode(text, start)
        return value, end, ""
    except json.JSONDecodeError as error:
        return None, start, f"the call is not JSON: {error.msg} at character {error.pos - start}"
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        return None, start, f"the call is not JSON that can be read: {reason}"


def decode_whole(text: str) -> tuple[Any, str]:
    """Read a text that is one JSON value: (value, error or "")."""
    value, end, error = decode(text)
    return value, error or ("something follows it" if text[end:].strip() else "")


def read_call(value: Any) -> Call | str:
    """Return a decoded value as a call, or what is wrong with it."""
    value = _unpacked(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f"a call has the form {_FORM}, got {short(value)}"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # In OpenAI's form, the arguments are a string of JSON.
        arguments, error = decode_whole(arguments)
        if error:
            return f"the arguments of {short(value['name'])} are a string that is not JSON"
    if not isinstance(arguments, dict):
        return f"the arguments of {short(value['name'])} must be a JSON object, got {short(arguments)}"
    return _checked(Call(value["name"], arguments))


def _checked(call: Call) -> Call | str:
    flaw = find_flaw([call.name, call.arguments])
    return f"the call of {short(call.name)} {flaw}" if flaw else call


def find_flaw(value: Any) -> str:
    """Return why a decoded value cannot be written as JSON in UTF-8, or "" if it can."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    except RecursionError:
        return "is nested too deep"
    return ""


def short(value: Any) -> str:
    """Return a value for an error message: at most 60 characters, safe to encode."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = type(value).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."
