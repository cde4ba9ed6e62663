"""The reference encoding, which renders a whole conversation at once, and the comparison with
it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError
from rollout.tokens.chat_template import USER, Message
from rollout.tokens.images import expanded
from rollout.tokens.rendering import Renderer

SanityCheck = Literal["strict", "ignore_strippable", "disable"]

CONTEXT = 8
"""Tokens shown before and after the first difference."""


def references(
    renderer: Renderer, text: PlainText, messages: Sequence[Message]
) -> Iterator[list[int]]:
    """Yield all id sequences that are correct for this conversation in the chosen mode, the
    likeliest first."""
    answered = messages[-1]["role"] == "assistant"
    messages = [*messages, USER] if answered else list(messages)
    # What follows the last response's end-of-turn token.
    tail = (
        text.join(expanded(renderer.whole([USER], tools=False, seen_tool=False)))[1:]
        if answered
        else []
    )

    def ids(
        messages: Sequence[Message], *, tools: bool = True, as_generated: bool = False
    ) -> list[int]:
        return text.join(expanded(renderer.whole(messages, tools=tools, as_generated=as_generated)))

    def without_tail(ids: list[int]) -> list[int]:
        return ids[: len(ids) - len(tail)]

    yield without_tail(ids(messages))
    yield without_tail(ids(messages, as_generated=True))
    # With the system message and the tools where the first prompt showed them, if that is possible.
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    rest = [m for m in messages if m["role"] != "system"]
    skipped = len(messages) - len(rest)
    try:
        bare = ids(rest[: first - skipped], tools=False)
        whole = without_tail(ids(rest, tools=False, as_generated=True))
        shown = ids(messages[:first])
    except EncodingError:
        return
    if whole[: len(bare)] == bare:
        yield shown + whole[len(bare) :]


def compare(
    ids: list[int],
    references: Iterable[list[int]],
    text: PlainText,
    headers: Sequence[TemplateText],
    mode: SanityCheck,
) -> None:
    """Accept ids that equal a reference, but for how the model split its own text; raises
    EncodingError otherwise."""
    differences: list[tuple[int, int, list[int]]] = []
    ours = _comparable(ids, text, headers, mode)
    for reference in references:
        theirs = _comparable(reference, text, headers, mode)
        ends = (None, len(ids)), (None, len(reference))
        pairs = zip_longest(ours, theirs)
        found = next(
            (
                (a or ends[0], b or ends[1])
                for a, b in pairs
                if a is None or b is None or a[0] != b[0]
            ),
            None,
        )
        if found is None:
            return
        (_, at), (_, there) = found
        while at < len(ids) and there < len(reference) and ids[at] == reference[there]:
            at = at + 1
            there = there + 1
        differences.append((at, there, reference))
    at, there, closest = max(differences, key=lambda difference: difference[0])

    def shown(tokens: list[int], position: int) -> str:
        if position >= len(tokens):
            return "nothing more"
        return f"token {tokens[position]} {text.decode([tokens[position]])!r}"

    raise EncodingError(
        f"the tokens differ from the chat template's one-shot encoding at position {at}: they have "
        f"{shown(ids, at)}, the template gives {shown(closest, there)}; after "
        f"{text.decode(ids[max(0, at - CONTEXT) : at])!r} they continue with "
        f"{text.decode(ids[at : at + CONTEXT])!r}, the template with "
        f"{text.decode(closest[there : there + CONTEXT])!r}. If the difference is intended, set "
        "tokenization_sanity_check to ignore_strippable (ignores white space) or disable"
    )


def _comparable(
    ids: Sequence[int], text: PlainText, headers: Sequence[TemplateText], mode: SanityCheck
) -> list[tuple[int | str, int]]:
    """What must be equal, and where it begins: tokens, and in place of those that a model wrote
    their text."""
    found: list[tuple[int | str, int]] = []
    begin = 0
    controls = [position for position, token in enumerate(ids) if token in text.control_ids]
    for end in [*controls, len(ids)]:
        written = text.decode(ids[begin:end])
        if mode == "ignore_strippable":
            found.append(("".join(written.split()), begin))
        elif any(
            _ends_with(ids, begin, header) and written.startswith(header.tail) for header in headers
        ):
            found.append((written, begin))
        else:
            found += [(token, position) for position, token in enumerate(ids[begin:end], begin)]
        if end < len(ids):
            found.append((ids[end], end))
        begin = end + 1
    return found


def _ends_with(ids: Sequence[int], end: int, header: TemplateText) -> bool:
    return bool(header.ids) and tuple(ids[max(0, end - len(header.ids)) : end]) == header.ids
