"""The reference encoding, which renders a whole conversation at once, and the comparison with it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError
from rollout.tokens.chat_template import ASSISTANT, LEFT, THOUGHT_END, USER, ChatTemplate, Message, before
from rollout.tokens.images import EncodedImage, ImageEncoder, Part, expanded
from rollout.tokens.profile import Profile

ANSWERS = 0xF0000
"""The first of the private-use characters that replace responses while a template is rendered."""

SanityCheck = Literal["strict", "ignore_strippable", "disable"]

CONTEXT = 8
"""Tokens shown before and after the first difference."""


class OneShot:
    """Renders whole conversations. With `keep_thoughts`, earlier responses keep thoughts that the template drops."""

    def __init__(
        self,
        template: ChatTemplate,
        profile: Profile,
        text: PlainText,
        images: ImageEncoder | None,
        *,
        keep_thoughts: bool,
    ) -> None:
        self._template = template
        self._profile = profile
        self._text = text
        self._images = images
        self._keep_thoughts = keep_thoughts and (profile.drops_thoughts or profile.leads_think)

    def keeps_thought(self, message: Message) -> bool:
        """Whether a response is shown with its own thought in place of what the template makes of it."""
        return self._keep_thoughts and _is_plain_answer(message) and THOUGHT_END in message["content"]

    def parts(self, messages: Sequence[Message], *, tools: bool = True, as_generated: bool = False) -> list[Part]:
        """Render the conversation and the generation header; with `as_generated`, responses as the model wrote them."""
        shown, plain = self._escaped(messages)
        bodies: dict[str, str] = {}
        for i, message in enumerate(shown):  # stand-ins for responses, which the template cannot shorten
            if _is_plain_answer(message) and (as_generated or self.keeps_thought(message)):
                bodies[mark := chr(ANSWERS + i)] = (messages if as_generated else shown)[i]["content"]
                shown[i] = {**message, "content": mark}
        text = self._template.render(shown, generation=True, tools=tools)
        for mark, body in bodies.items():
            header, _, rest = text.partition(mark)
            start = self._profile.without_lead(header)
            if as_generated and start.endswith(self._profile.answer_start):
                body = self._profile.lead + body.removeprefix(self._profile.lead)
            text = start + body + rest
        return self._split(text, plain, messages)

    def continuation(self, messages: Sequence[Message], seen_tool: bool) -> list[Part]:
        """What follows a response's text: these messages and the next generation header."""
        shown, plain = self._escaped(messages)
        base = [*before("assistant", seen_tool), {**ASSISTANT, "content": LEFT}]
        text = self._template.render([*base, *shown], generation=True, tools=False)
        return self._split(text[text.index(LEFT) + 1 :], plain, messages)

    def references(self, messages: Sequence[Message]) -> Iterator[list[int]]:
        """Yield all id sequences that are correct for this conversation in the chosen mode, the likeliest first."""
        answered = messages[-1]["role"] == "assistant"
        messages = [*messages, USER] if answered else list(messages)
        yield self._ids(messages, answered)
        yield self._ids(messages, answered, as_generated=True)
        # With the system message and the tools where the first prompt showed them, if that is possible.
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        rest = [m for m in messages if m["role"] != "system"]
        skipped = len(messages) - len(rest)
        try:
            bare = self._ids(rest[: first - skipped], False, tools=False)
            whole = self._ids(rest, answered, tools=False, as_generated=True)
            shown = self._ids(messages[:first], False)
        except EncodingError:
            return
        if whole[: len(bare)] == bare:
            yield shown + whole[len(bare) :]

    def _ids(self, messages: Sequence[Message], answered: bool, **options: Any) -> list[int]:
        """Ids of the conversation; if `answered`, without what follows the last response's end-of-turn token."""
        ids = self._text.join(expanded(self.parts(messages, **options)))
        if not answered:
            return ids
        tail = self._text.join(expanded(self.continuation([USER], seen_tool=False)))
        return ids[: len(ids) - len(tail) + 1]

    def _split(self, text: str, plain: Mapping[int, str], messages: Sequence[Message]) -> list[Part]:
        images = [
            self.image(part["image"])
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part.get("type") == "image"
        ]
        texts = text.split(self._images.placeholder_text) if images and self._images else [text]
        if len(texts) != len(images) + 1:
            raise EncodingError(
                f"the messages have {len(images)} pictures but the chat template shows {len(texts) - 1}; pass "
                "pictures as content parts of type 'image', in roles for which the template shows pictures"
            )
        pieces = [self._text.template_text(piece, plain) for piece in texts]
        return [part for pair in zip_longest(pieces, images) for part in pair if part is not None]

    def image(self, image: Any) -> EncodedImage:
        """Return the image's tokens and payloads; raises EncodingError if it cannot be used."""
        assert self._images is not None, "messages with images were refused"
        return self._images.encode(image)

    def _escaped(self, messages: Sequence[Message]) -> tuple[list[Message], dict[int, str]]:
        marks: dict[str, str] = {}

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return self._text.stand_ins(value, marks)
            if isinstance(value, Mapping):
                return {"type": "image"} if value.get("type") == "image" else {k: escape(v) for k, v in value.items()}
            return [escape(v) for v in value] if isinstance(value, list) else value

        shown = [{k: v if k == "role" else escape(v) for k, v in m.items()} for m in messages]
        return shown, {ord(mark): string for string, mark in marks.items()}


def _is_plain_answer(message: Message) -> bool:
    return message["role"] == "assistant" and isinstance(message.get("content"), str) and len(message) == 2


class Run(NamedTuple):
    """A control token (None at the start), the ordinary tokens after it, and the position of the first of these."""

    control: int | None
    plain: list[int]
    start: int


def compare(
    ids: list[int], references: Iterable[list[int]], text: PlainText, headers: Sequence[TemplateText], mode: SanityCheck
) -> None:
    """Accept ids that equal a reference, but for how the model split its own text; raises EncodingError otherwise."""
    differences = []
    for reference in references:
        at = _first_difference(ids, reference, text, headers, mode)
        if at is None:
            return
        differences.append((at, reference))
    (ours, theirs), closest = max(differences, key=lambda difference: difference[0][0])

    def shown(tokens: list[int], position: int) -> str:
        if position >= len(tokens):
            return "nothing more"
        return f"token {tokens[position]} {text.decode([tokens[position]])!r}"

    raise EncodingError(
        f"the tokens differ from the chat template's one-shot encoding at position {ours}: they have "
        f"{shown(ids, ours)}, the template gives {shown(closest, theirs)}; after "
        f"{text.decode(ids[max(0, ours - CONTEXT) : ours])!r} they continue with "
        f"{text.decode(ids[ours : ours + CONTEXT])!r}, the template with "
        f"{text.decode(closest[theirs : theirs + CONTEXT])!r}. If the difference is intended, set "
        "tokenization_sanity_check to ignore_strippable (ignores white space) or disable"
    )


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
        if a.plain != b.plain and not _same(ids, a, b, text, headers, mode):
            pairs = enumerate(zip(a.plain, b.plain, strict=False))
            common = next((k for k, (x, y) in pairs if x != y), min(len(a.plain), len(b.plain)))
            return a.start + common, b.start + common
    if len(ours) == len(theirs):
        return None
    last = min(len(ours), len(theirs)) - 1
    return ours[last].start + len(ours[last].plain), theirs[last].start + len(theirs[last].plain)


def _same(
    ids: list[int], ours: Run, theirs: Run, text: PlainText, headers: Sequence[TemplateText], mode: SanityCheck
) -> bool:
    """Whether the texts are the same, and follow a generation header, so the model may have split them otherwise."""
    a, b = text.decode(ours.plain), text.decode(theirs.plain)
    if mode == "ignore_strippable":
        return "".join(a.split()) == "".join(b.split())
    before = ids[: ours.start]
    return a == b and any(
        header.ids and before[-len(header.ids) :] == list(header.ids) and a.startswith(header.tail)
        for header in headers
    )


def _runs(ids: Sequence[int], text: PlainText) -> list[Run]:
    runs = [Run(None, [], 0)]
    for position, token in enumerate(ids):
        if token in text.control_ids:
            runs.append(Run(token, [], position + 1))
        else:
            runs[-1].plain.append(token)
    return runs
