"""The tokenization sanity check: compares token ids with the one-shot encoding and explains the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError

SanityCheck = Literal["strict", "ignore_strippable", "disable"]

CONTEXT = 8
"""Tokens shown before and after the first difference."""


class Run(NamedTuple):
    """A control token (None at the start), the ordinary tokens after it, and the position of the first of these."""

    control: int | None
    plain: list[int]
    start: int


def compare(
    ids: list[int],
    references: Iterable[list[int]],
    text: PlainText,
    headers: Sequence[TemplateText],
    mode: SanityCheck,
) -> None:
    """Accept ids that equal one of the references, except for how the model split its own text into tokens.

    Raises:
        EncodingError: no reference matches; names the first token that differs from the closest one, in context.
    """
    differences = []
    for reference in references:
        at = _first_difference(ids, reference, text, headers, mode)
        if at is None:
            return
        differences.append((at, reference))
    at, closest = max(differences, key=lambda difference: difference[0][0])
    raise EncodingError(_explained(ids, closest, at, text))


def _first_difference(
    ids: list[int], reference: list[int], text: PlainText, headers: Sequence[TemplateText], mode: SanityCheck
) -> tuple[int, int] | None:
    """Positions of the first difference in both sequences; None if they are equal for this mode."""
    if ids == reference:
        return None
    ours, theirs = _runs(ids, text), _runs(reference, text)
    for a, b in zip(ours, theirs, strict=False):
        if a.control != b.control:
            return a.start - 1, b.start - 1
        if a.plain != b.plain and not _same(a.plain, b.plain, text, mode, _is_answer(ids, a, text, headers)):
            pairs = enumerate(zip(a.plain, b.plain, strict=False))
            common = next((k for k, (x, y) in pairs if x != y), min(len(a.plain), len(b.plain)))
            return a.start + common, b.start + common
    if len(ours) == len(theirs):
        return None
    last = min(len(ours), len(theirs)) - 1
    return ours[last].start + len(ours[last].plain), theirs[last].start + len(theirs[last].plain)


def _same(ours: list[int], theirs: list[int], text: PlainText, mode: SanityCheck, answer: bool) -> bool:
    a, b = text.decode(ours), text.decode(theirs)
    if mode == "ignore_strippable":
        return "".join(a.split()) == "".join(b.split())
    return answer and a == b


def _is_answer(ids: list[int], run: Run, text: PlainText, headers: Sequence[TemplateText]) -> bool:
    """Whether the run's ordinary tokens follow a generation header, so the model may have written them."""
    before = ids[: run.start]
    return any(
        before[-len(header.ids) :] == list(header.ids) and text.decode(run.plain).startswith(header.tail)
        for header in headers
        if header.ids
    )


def _runs(ids: Sequence[int], text: PlainText) -> list[Run]:
    runs = [Run(None, [], 0)]
    for position, token in enumerate(ids):
        if token in text.control_ids:
            runs.append(Run(token, [], position + 1))
        else:
            runs[-1].plain.append(token)
    return runs


def _explained(ids: list[int], reference: list[int], at: tuple[int, int], text: PlainText) -> str:
    ours, theirs = at

    def shown(tokens: list[int], position: int) -> str:
        if position >= len(tokens):
            return "nothing more"
        return f"token {tokens[position]} {text.decode([tokens[position]])!r}"

    return (
        f"the tokens differ from the chat template's one-shot encoding at position {ours}: they have "
        f"{shown(ids, ours)}, the template gives {shown(reference, theirs)}; after "
        f"{text.decode(ids[max(0, ours - CONTEXT) : ours])!r} they continue with "
        f"{text.decode(ids[ours : ours + CONTEXT])!r}, the template with "
        f"{text.decode(reference[theirs : theirs + CONTEXT])!r}. If the difference is intended, set "
        "tokenization_sanity_check to ignore_strippable (ignores white space) or disable"
    )
