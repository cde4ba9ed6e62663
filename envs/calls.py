"""Finds tool calls in a model's response; a call that cannot be read becomes an error message for
the model.

JSON objects are read between `<tool_call>` tags (Hermes, which our own prompts teach) and as the
whole response. So is the form of the policy's chat template, if the caller gives it. Broken calls
are not repaired, because a policy that is rewarded for them learns to write them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from envs.call_form import MARKUP, CallForm, loose
from envs.json_text import decode, decode_whole, find_flaw, short

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_REASONING_START = "<think>"
_REASONING_END = "</think>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")
_FENCED = re.compile(r"```(?:json|tool_call)?(.*)```", re.DOTALL)
_SEPARATOR = re.compile(r"[\s;,]*")
_CLOSED = re.compile(rf"\s*(?:{CLOSE}|{OPEN}|\Z)")
"""What must follow a call: a tag, or the end of the text."""
_FORM = '{"name": ..., "arguments": {...}}'
_UNCLOSED = f"after the call comes something other than {CLOSE}"
_FOREIGN = re.compile(
    r"</?(?:\w+:)?tool_call>|<function=|<invoke name=|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call|<｜tool▁call"
    r"|<arg_key>|\bto=functions\.|\A\s*\[\w+\([^\n]*\)\]\s*\Z"
    r'|\{\s*"name"\s*:\s*"[^"\n]*"\s*,\s*"(?:arguments|parameters)"\s*:'
)
"""Text that only calls contain, in whichever form."""


@dataclass(frozen=True)
class _Forms:
    """The forms of calls that a response is searched for, besides JSON; the policy's own comes
    first."""

    forms: tuple[CallForm, ...]

    @property
    def shape(self) -> str:
        """The form that error messages show."""
        own = self.forms[0]
        return f"{OPEN}{_FORM}{CLOSE}" if own is MARKUP else own.shape

    @cached_property
    def openers(self) -> re.Pattern[str]:
        """What begins a call."""
        return re.compile("|".join([*(form.starts.pattern for form in self.forms), OPEN]))

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Text that only calls contain: of foreign forms, and the tags of these."""
        fixed = [text for form in self.forms for text in (form.opener, form.closer, *form.section)]
        tags = re.findall(r"<[^<>\s]+>", " ".join(fixed))
        return re.compile("|".join([_FOREIGN.pattern, *map(re.escape, tags)]))

    @cached_property
    def section_ends(self) -> re.Pattern[str]:
        """What stands after the last call."""
        ends = [loose(form.section[1]) for form in self.forms if form.section[1]]
        return re.compile(rf"\s*(?:{'|'.join(ends)})" if ends else r"(?!)")


@lru_cache
def _searched(form: CallForm) -> _Forms:
    return _Forms((MARKUP,) if form == MARKUP else (form, MARKUP))


_policy_form = MARKUP


def set_policy_form(form: CallForm | None) -> None:
    """Read this form where a caller of `find_calls` gives none: how the policy of this process
    writes calls."""
    global _policy_form
    _policy_form = form or MARKUP


@dataclass(frozen=True)
class Call:
    """One readable call."""

    name: str
    arguments: Mapping[str, Any]
    as_text: bool = False
    """The call was markup, so all its values are still strings."""
    identity: str = ""
    """The call's own id, if its form holds one beside the name."""


@dataclass(frozen=True)
class Calls:
    """The calls of one response, and the errors in calls that cannot be read, each in order of
    appearance."""

    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    """Characters [start, end) from the first to the last call; None if the response has none."""
    cut: bool = False
    """There were more calls than `limit`."""
    foreign: bool = False
    """The text has a piece of a call, in a form that is not read."""

    @property
    def valid(self) -> bool:
        """At least one call, and every call readable."""
        return bool(self.calls) and not self.errors


def find_calls(text: str, limit: int = 8, form: CallForm | None = None) -> Calls:
    """Find the calls after a response's reasoning; tags inside a call's string belong to it. Never
    raises.

    Args:
        limit: calls that are read at most.
        form: how the policy's chat template writes calls; None for the policy of this process. JSON
            and markup are always read.
    """
    forms = _searched(form or _policy_form)
    start = reasoning_end(text, form)
    if start is None:
        return Calls()
    opener = forms.openers.search(text, start)
    bare = _bare(text, start, limit)
    if bare.valid or (opener is None and bare.span):
        return bare
    if opener is None:
        return _unreadable(text, start, forms)
    first = end = opener.start()
    found: list[Call | str] = []
    while opener is not None and len(found) < limit:
        block, read, closer = _block(text, opener.start(), forms)
        found.append(block)
        opener = forms.openers.search(text, max(read, opener.end()))
        end = opener.start() if opener is not None else len(text)
        # The end tag may be missing before the next call or the end of the text.
        close = text.find(closer, read, end)
        if close >= 0:
            end = close + len(closer)
    closed = forms.section_ends.match(text, end)
    return _collected(found, (first, closed.end() if closed else end), cut=opener is not None)


def _unreadable(text: str, start: int, forms: _Forms) -> Calls:
    """An error for text that only calls contain; no calls if there is none."""
    marked = forms.marks.search(text[start:])
    if marked is None:
        return Calls()
    found = short(marked.group().strip()[:40])
    what = f"{found} belongs to a call that cannot be read; a call has the form {forms.shape}"
    return Calls(errors=(what,), span=(start + marked.start(), len(text)), foreign=True)


def outside_thoughts(response_text: str) -> tuple[int, int]:
    """Return the [start, end) characters after the last `</think>` and before a `<think>` that
    never ends."""
    before, end_tag, after = response_text.rpartition(_REASONING_END)
    begin = len(before) + len(end_tag)
    return begin, begin + len(after.partition(_REASONING_START)[0])


def reasoning_end(text: str, form: CallForm | None = None) -> int | None:
    """Return the position after the last block of reasoning; None if reasoning never ends. `form`:
    as `find_calls`."""
    position = 0
    while True:
        rest = text[position:]
        end = rest.find(_REASONING_END)
        reasons = rest.lstrip().startswith(_REASONING_START)
        if end < 0:
            return None if reasons else position
        if not reasons and _inside_call(rest, end, _searched(form or _policy_form)):
            return position
        position += end + len(_REASONING_END)


def _inside_call(text: str, position: int, forms: _Forms) -> bool:
    """Return whether `position` is inside a call or a bare response of JSON, so inside one of its
    strings."""
    if text.lstrip().startswith(("{", "[")):
        _, end, error = decode(text)
        return not error and end > position
    opener = forms.openers.search(text, 0, position)
    while opener is not None:
        block, end, _ = _block(text, opener.start(), forms)
        if isinstance(block, str) or end > position:
            return not isinstance(block, str)
        opener = forms.openers.search(text, max(end, opener.end()), position)
    return False


def _block(text: str, start: int, forms: _Forms) -> tuple[Call | str, int, str]:
    """Return the call at an opener, where its text ends (`start` if that is unknown), and what
    closes it."""
    failed: tuple[Call | str, int, str] | None = None
    for form in forms.forms:
        if head := form.head.match(text, start):
            block, end = (
                _markup(text, head, form) if form.key else _json_arguments(text, head, form, forms)
            )
            found = block, end, form.closer.strip().rpartition("\n")[2]
            if isinstance(block, Call):
                return found
            failed = failed or found
    if failed is not None:
        return failed
    if not text.startswith(OPEN, start):
        form = next(form for form in forms.forms if form.starts.match(text, start))
        return f"a call has the form {form.shape}", start, form.closer.strip()
    start += len(OPEN)
    value, end, error = decode(text, start)
    if error:
        return error, start, CLOSE
    return read_call(value) if _CLOSED.match(text, end) else _UNCLOSED, end, CLOSE


def _json_arguments(
    text: str, head: re.Match[str], form: CallForm, forms: _Forms
) -> tuple[Call | str, int]:
    """Return the call whose arguments are a JSON object after its name, and where its text ends."""
    arguments, end, error = decode(text, head.end())
    name = short(head["name"])
    if error:
        return error, head.start()
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be a JSON object, got {short(arguments)}", end
    is_closed = form.ends.match(text, end) or forms.openers.match(text, end)
    if not is_closed and text[end:].strip():
        return f"after the call of {name} comes something other than {form.closer.strip()}", end
    return _checked(Call(head["name"], arguments, identity=_identity(head, form))), end


def _identity(head: re.Match[str], form: CallForm) -> str:
    """The text between the markers around a call's name, if it is more than the name."""
    name = head["name"]
    before = re.split(r"[>\]｜]", form.opener)[-1]
    after = head.string[head.end("name") : head.end()]
    found = f"{before}{name}{re.split(r'[<[]', after)[0]}".strip()
    return found if found != name else ""


def _markup(text: str, head: re.Match[str], form: CallForm) -> tuple[Call | str, int]:
    """Return the call whose arguments stand one by one between fixed texts, and where its text
    ends."""
    name = short(head["name"])
    arguments = dict[str, str]()
    at = head.end()
    while pair := form.pair.match(text, at):
        end = form.pair_end.search(text, pair.end())
        if end is None:
            break
        if pair["key"] in arguments:
            return f"the call of {name} gives the argument {short(pair['key'])} twice", end.end()
        value = text[pair.end() : end.start()]
        if form.value.endswith("\n"):
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[pair["key"]] = value
        at = end.end()
    closed = form.ends.match(text, at)
    if closed is None:
        closer = form.closer.split()[0]
        if text.find(closer, at) < 0:
            return f"the call of {name} has no {closer}", head.start()
        shape = f"{form.key}argument{form.value}value{form.value_end}".replace("\n", "")
        return (
            f"the call of {name} holds something other than {shape}, or something after its last "
            "one",
            at,
        )
    call = _checked(Call(head["name"], arguments, as_text=True))
    rest = form.closer.split()[1:]
    followed = not rest or _CLOSED.match(text, closed.end())
    return call if isinstance(call, str) or followed else _UNCLOSED, closed.end()


def _bare(text: str, start: int, limit: int) -> Calls:
    """Calls in a response that is only JSON: an object, a list of objects, or several objects in
    sequence."""
    body = text[start:].strip()
    content = _unwrapped(body)
    if not content.startswith(("{", "[")):
        return Calls()
    first = text.index(body, start)
    span = (first, first + len(body))
    values = list[Any]()
    error = ""
    position = 0
    while position < len(content) and len(values) <= limit and not error:
        value, end, error = decode(content, position)
        if not error:
            values += value if isinstance(value, list) else [value]
            separator = _SEPARATOR.match(content, end)
            position = separator.end() if separator is not None else end
    inner = [call for call in map(_unpacked, values) if isinstance(call, dict)]
    if not any("name" in call and ("arguments" in call or "parameters" in call) for call in inner):
        # JSON without a tool's name is a final answer; broken JSON that starts like a call is a
        # broken call.
        return (
            Calls(errors=(error,), span=span)
            if error and re.match(r'[\[\s]*\{\s*"name"', content)
            else Calls()
        )
    found: list[Call | str] = [read_call(value) for value in values[:limit]]
    if error and len(values) <= limit:
        found.append(error)
    return _collected(found, span, cut=len(values) > limit)


def _unwrapped(body: str) -> str:
    """Return the response without a leading marker or a code fence around all of it."""
    for marker in _MARKERS:
        body = body.removeprefix(marker)
    fenced = _FENCED.fullmatch(body)
    return (fenced[1] if fenced else body).strip()


def _unpacked(value: Any) -> Any:
    """Return what is inside of `{"function": {...}}`, OpenAI's form."""
    return (
        value["function"]
        if isinstance(value, dict) and isinstance(value.get("function"), dict)
        else value
    )


def _collected(found: list[Call | str], span: tuple[int, int], cut: bool) -> Calls:
    calls = tuple(item for item in found if isinstance(item, Call))
    return Calls(calls, tuple(item for item in found if isinstance(item, str)), span, cut)


def read_call(value: Any) -> Call | str:
    """Return a decoded value as a call, or what is wrong with it."""
    value = _unpacked(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f"a call has the form {_FORM}, got {short(value)}"
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        # In OpenAI's form, the arguments are a string of JSON.
        arguments, error = decode_whole(arguments)
        if error:
            return f"the arguments of {short(value['name'])} are a string that is not JSON"
    if not isinstance(arguments, dict):
        return (
            f"the arguments of {short(value['name'])} must be a JSON object, got {short(arguments)}"
        )
    return _checked(Call(value["name"], arguments))


def _checked(call: Call) -> Call | str:
    flaw = find_flaw([call.name, call.arguments])
    return f"the call of {short(call.name)} {flaw}" if flaw else call
