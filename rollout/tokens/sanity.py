"""The tokenization sanity check: where a sequence leaves its one-shot encoding, said in words and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from envs.plain_text import Frame, PlainText
from rollout.errors import EncodingError

SanityCheck = Literal["strict", "ignore_strippable", "disable"]

CONTEXT = 8
"""Tokens shown before and after the first difference."""

Run = tuple[int | None, list[int], int]
"""A control token (None at the start), the plain tokens after it, and the position of the first of these."""


def compare(
    ids: list[int],
    references: Sequence[list[int]],
    text: PlainText,
    headers: Sequence[Frame],
    mode: SanityCheck,
) -> None:
    """Accept ids that equal one of the references, up to how the model split its own text into tokens.

    Raises:
        EncodingError: names the first differing token of the closest reference, in its context.
    """
    found = [_first_difference(ids, reference, text, headers, mode) for reference in references]
    if None in found:
        return
    at, closest = max(zip(found, references, strict=True), key=lambda pair: pair[0][0])  # type: ignore[index]
    raise EncodingError(_explained(ids, closest, at, text))  # type: ignore[arg-type]


def _first_difference(
    ids: list[int], reference: list[int], text: PlainText, headers: Sequence[Frame], mode: SanityCheck
) -> tuple[int, int] | None:
    """Positions of the first difference in both sequences; None where there is none that counts."""
    if ids == reference:
        return None
    ours, theirs = _runs(ids, text), _runs(reference, text)
    for a, b in zip(ours, theirs, strict=False):
        if a[0] != b[0]:
            return a[2] - 1, b[2] - 1
        if a[1] == b[1]:
            continue
        if not _same(a[1], b[1], text, mode, _is_answer(ids, a, text, headers)):
            common = next((k for k, (x, y) in enumerate(zip(a[1], b[1], strict=False)) if x != y), None)
            common = min(len(a[1]), len(b[1])) if common is None else common
            return a[2] + common, b[2] + common
    if len(ours) == len(theirs):
        return None
    shorter = min(len(ours), len(theirs))
    return _end(ours[shorter - 1]), _end(theirs[shorter - 1])


def _end(run: Run) -> int:
    return run[2] + len(run[1])


def _same(ours: list[int], theirs: list[int], text: PlainText, mode: SanityCheck, answer: bool) -> bool:
    a, b = text.decode(ours), text.decode(theirs)
    if mode == "ignore_strippable":
        return "".join(a.split()) == "".join(b.split())
    return answer and a == b


def _is_answer(ids: list[int], run: Run, text: PlainText, headers: Sequence[Frame]) -> bool:
    """Whether the plain tokens follow a header that asks for an answer, so that the model may have written them."""
    before = ids[: run[2]]
    return any(
        before[len(before) - len(header.ids) :] == list(header.ids)
        and text.decode(run[1]).startswith(header.tail)
        for header in headers
        if header.ids
    )


def _runs(ids: Sequence[int], text: PlainText) -> list[Run]:
    control = text.control_ids
    runs: list[Run] = [(None, [], 0)]
    for position, token in enumerate(ids):
        if token in control:
            runs.append((token, [], position + 1))
        else:
            runs[-1][1].append(token)
    return runs


def _explained(ids: list[int], reference: list[int], at: tuple[int, int], text: PlainText) -> str:
    ours, theirs = at

    def shown(tokens: list[int], position: int) -> str:
        if position >= len(tokens):
            return "nothing more"
        return f"token {tokens[position]} {text.decode([tokens[position]])!r}"

    return (
        f"the tokens leave the chat template's one-shot encoding at position {ours}: they have {shown(ids, ours)}, "
        f"the template gives {shown(reference, theirs)}; after {text.decode(ids[max(0, ours - CONTEXT) : ours])!r} "
        f"they go on {text.decode(ids[ours : ours + CONTEXT])!r}, the template "
        f"{text.decode(reference[theirs : theirs + CONTEXT])!r}. If the difference is meant, set "
        "tokenization_sanity_check: ignore_strippable (white space only) or disable"
    )
