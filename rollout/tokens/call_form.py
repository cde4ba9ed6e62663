"""Learns from a chat template how a model writes calls: renders calls with marked names and values,
reads them back."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.call_form import MARKUP, CallForm
from envs.calls import find_calls
from envs.json_text import decode
from rollout.tokens.chat_template import LEFT, THOUGHT_END, USER, ChatTemplate, common_start

MarkedCall = tuple[str, Mapping[str, Any]]

FIRST: MarkedCall = ("markedname", {"firstkey": "firstvalue", "secondkey": "secondvalue"})
SECOND: MarkedCall = ("othername", {"thirdkey": "thirdvalue"})
EMPTY: MarkedCall = ("emptyname", {})
PART_OF_TAG = re.compile(r"<[^<>]*\Z")
"""The beginning of a tag at the end of a text."""


def learn_call_form(
    template: ChatTemplate, answer_start: str, stops: Sequence[str]
) -> tuple[CallForm | None, bool]:
    """Return the form of the template's calls, and whether all calls that it writes are read back.

    The form is None if a call is one JSON object, which is always read, and if the template writes
    no calls.

    Args:
        answer_start: the end of every header of a response.
        stops: texts of the tokens that end a response.
    """
    examples: list[Sequence[MarkedCall]] = [[FIRST], [FIRST, SECOND], [EMPTY]]
    one, two, empty = (_written(template, calls, answer_start, stops) for calls in examples)
    if one is None:
        written = template.with_call([USER], calls=[FIRST])
        shows_none = template.attempt([USER, {"role": "assistant", "content": ""}]) == written
        return None, written is None or shows_none
    form = _form(one, two)
    texts = zip(examples, (one, two, empty), strict=True)
    return form, all(text is None or _reads(text, calls, form) for calls, text in texts)


def _written(
    template: ChatTemplate, calls: Sequence[MarkedCall], answer_start: str, stops: Sequence[str]
) -> str | None:
    """The calls as the template writes them, without the response's header and end; None if it does
    not show them."""
    text = template.with_call([{**USER, "content": LEFT}], calls=calls) or LEFT
    text = text[text.index(LEFT) + 1 :]
    if any(name not in text for name, _ in calls):
        return None
    begin = text.index(calls[0][0])
    header = (
        text.rfind(answer_start, 0, begin) + len(answer_start)
        if answer_start in text[:begin]
        else 0
    )
    thought = text.rfind(THOUGHT_END, 0, begin)
    body = text[max(header, thought + len(THOUGHT_END) if thought >= 0 else 0) :].strip()
    for stop in stops:
        body = body.removesuffix(stop)
    return body


def _reads(text: str, calls: Sequence[MarkedCall], form: CallForm | None) -> bool:
    found = find_calls(text, form=form or MARKUP)
    return found.valid and [(call.name, dict(call.arguments)) for call in found.calls] == list(
        calls
    )


def _form(one: str, two: str | None) -> CallForm | None:
    """The fixed texts around the marks in one call, and in two; None if the call is one JSON
    object."""
    name, arguments = FIRST
    before, _, rest = one.partition(name)
    place = _json_place(rest, arguments)
    if place is None:
        return _form_of_pairs(before, rest, two)
    if before.rstrip().endswith('"'):
        return None
    between = (
        None if two is None else two[two.index(rest[: place[1]]) + place[1] : two.index(SECOND[0])]
    )
    opener, closer, section = _apart(before, rest[place[1] :], between)
    return CallForm(opener, rest[: place[0]], closer, section=section)


def _form_of_pairs(before: str, rest: str, two: str | None) -> CallForm | None:
    """The form of a call whose arguments stand one by one; None if they do not."""
    marks = [mark for pair in FIRST[1].items() for mark in pair]
    places = [rest.find(mark) for mark in marks]
    if min(places) < 0 or places != sorted(places):
        return None
    gaps: list[str] = []
    for mark in marks:
        gap, _, rest = rest.partition(mark)
        gaps.append(gap)
    to_key, value, between_pairs, _ = gaps
    key = common_end(to_key, between_pairs)
    value_end = between_pairs.removesuffix(key)
    between = (
        None if two is None else two[two.index(marks[-1]) + len(marks[-1]) : two.index(SECOND[0])]
    )
    opener, closer, section = _apart(before, rest, between)
    closer = closer.removeprefix(value_end)
    return CallForm(opener, to_key.removesuffix(key), closer, key, value, value_end, section)


def _apart(before: str, after: str, between: str | None) -> tuple[str, str, tuple[str, str]]:
    """What opens and closes a call, and what stands around all calls; `between` is the text between
    two calls."""
    if between is None:
        return before.strip(), after, ("", "")
    opener = common_end(before, between)
    closer = _whole_tags(after, between)
    section = before.removesuffix(opener).strip(), after.removeprefix(closer).strip()
    return opener.strip(), closer, section


def _json_place(text: str, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """The [start, end) of the JSON object with these members; None if there is none."""
    for found in re.finditer(r"\{", text):
        value, end, _ = decode(text, found.start())
        if value == arguments:
            return found.start(), end
    return None


def common_end(first: str, second: str) -> str:
    """The longest text with which both end, from the beginning of a tag on."""
    shared = common_start([first[::-1], second[::-1]])[::-1]
    starts_inside = "<" in shared and not shared.lstrip().startswith("<")
    return shared[shared.index("<") :] if starts_inside else shared


def _whole_tags(first: str, second: str) -> str:
    """The longest text with which both begin, without a tag that only begins in it."""
    return PART_OF_TAG.sub("", common_start([first, second]))
