"""Conversations as parts: what the template writes, and the texts and images that stand between.

A template is rendered once per sequence of roles, with marks in place of texts. Its pieces are
kept, so a prompt of known roles needs no rendering. Conversations with images, calls or texts that
the template changes are always rendered.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError
from rollout.tokens.chat_template import ASSISTANT, LEFT, THOUGHT_END, ChatTemplate, Message, before
from rollout.tokens.images import ImageEncoder, Part, expanded
from rollout.tokens.profile import Profile

TEXTS, ANSWERS = 0xF0000, 0xF8000
"""The first of the private-use characters that stand for texts while a template is rendered, and of
those that stand for responses that are shown as they are given, in place of what the template makes
of them."""


@dataclass
class Skeleton:
    """A rendered conversation, with marks in place of its texts."""

    pieces: Sequence[TemplateText | str]
    is_right: bool | None = None
    """Whether it gave the tokens of the whole rendering when it was first used; None before."""


class Renderer:
    """Renders conversations. With `keep_thoughts`, earlier responses keep thoughts that the
    template drops."""

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
        self._skeleton = lru_cache(1024)(self._new_skeleton)
        self._shared: dict[TemplateText | str, TemplateText | str] = {}
        """What skeletons have in common, so that those of long conversations take little memory."""
        gaps = f"[{chr(TEXTS)}-{chr(0xFFFFF)}]"
        self._gaps = re.compile(
            f"({gaps}|{re.escape(images.placeholder_text)})" if images else f"({gaps})"
        )

    def parts(
        self, messages: Sequence[Message], *, tools: bool = True, seen_tool: bool | None = None
    ) -> Sequence[Part]:
        """Return the conversation and the generation header, from a kept skeleton if that gives the
        same tokens.

        Args:
            seen_tool: the messages follow a response, whose conversation had a tool's result or
                not; None: they open the conversation.
        """
        texts: dict[str, Part] = {}
        shown: list[tuple[str, str]] = []
        for number, message in enumerate(messages):
            content = message.get("content")
            rule = self._template.text_rule(message["role"])
            if len(message) != 2 or not isinstance(content, str) or rule is None:
                return self.whole(messages, tools=tools, seen_tool=seen_tool)
            mark = ""
            if self._keeps_thought(message):
                mark = chr(ANSWERS + number)
                texts[mark] = content
            elif content.strip():
                mark = chr(TEXTS + number)
                texts[mark] = rule(content)
            shown.append((message["role"], mark or content))
        skeleton = self._skeleton(tuple(shown), tools, seen_tool)
        parts = self._filled(skeleton.pieces, texts)
        if skeleton.is_right is None:
            whole = self.whole(messages, tools=tools, seen_tool=seen_tool)
            skeleton.is_right = self._text.join(expanded(parts)) == self._text.join(expanded(whole))
        return (
            parts if skeleton.is_right else self.whole(messages, tools=tools, seen_tool=seen_tool)
        )

    def whole(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = True,
        seen_tool: bool | None = None,
        as_generated: bool = False,
    ) -> list[Part]:
        """Render the texts as well; with `as_generated`, responses are shown as the model wrote
        them."""
        marks: dict[str, str] = {}
        shown = [self._escaped(message, marks) for message in messages]
        texts: dict[str, Part] = {}
        for number, message in enumerate(messages):
            if not (as_generated and _is_plain_answer(message)) and not self._keeps_thought(
                message
            ):
                continue
            mark = chr(ANSWERS + number)
            content = message["content"]
            shown[number] = {**message, "content": mark}
            lead = self._profile.lead
            texts[mark] = (
                self._text.template_text(lead + content.removeprefix(lead))
                if as_generated
                else content
            )
        contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        images = [
            part["image"] for content in contents for part in content if part.get("type") == "image"
        ]
        stand_ins = {ord(mark): string for string, mark in marks.items()}
        return self._filled(self._pieces(shown, tools, seen_tool, stand_ins), texts, images)

    def _keeps_thought(self, message: Message) -> bool:
        """Whether a response is shown with its own thought in place of what the template makes of
        it."""
        return (
            self._keep_thoughts and _is_plain_answer(message) and THOUGHT_END in message["content"]
        )

    def _new_skeleton(
        self, shown: Sequence[tuple[str, str]], tools: bool, seen_tool: bool | None
    ) -> Skeleton:
        messages = [{"role": role, "content": content} for role, content in shown]
        pieces = self._pieces(messages, tools, seen_tool, {})
        return Skeleton([self._shared.setdefault(piece, piece) for piece in pieces])

    def _pieces(
        self,
        messages: Sequence[Message],
        tools: bool,
        seen_tool: bool | None,
        stand_ins: Mapping[int, str],
    ) -> list[TemplateText | str]:
        """Render messages, and split the text at marks and images; `stand_ins` says what else is
        replaced."""
        earlier = (
            []
            if seen_tool is None
            else [*before("assistant", seen_tool), {**ASSISTANT, "content": LEFT}]
        )
        text = self._template.render([*earlier, *messages], generation=True, tools=tools)
        text = text[text.index(LEFT) + 1 :] if earlier else text
        pieces: list[TemplateText | str] = []
        found = self._gaps.split(text)
        for written, gap in zip_longest(found[::2], found[1::2]):
            if gap is not None and ord(gap[0]) >= ANSWERS:
                written = self._profile.without_lead(written)
            pieces.append(self._text.template_text(written, stand_ins))
            pieces += [] if gap is None else [gap]
        return pieces

    def _filled(
        self,
        pieces: Sequence[TemplateText | str],
        texts: Mapping[str, Part],
        images: Sequence[Any] = (),
    ) -> list[Part]:
        """Put texts and images where their marks are."""
        places = sum(isinstance(piece, str) and len(piece) > 1 for piece in pieces)
        if places != len(images):
            raise EncodingError(
                f"the messages have {len(images)} pictures but the chat template shows {places}; "
                "pass pictures as content parts of type 'image', in roles for which the template "
                "shows pictures"
            )
        assert self._images is not None or not images, "messages with images were refused"
        encoded = map(self._images.encode, images) if self._images else iter(())
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(texts[piece] if piece in texts else next(encoded))
            else:
                parts.append(piece)
        return parts

    def _escaped(self, value: Any, marks: dict[str, str]) -> Any:
        """A message, or a value in it, with stand-ins for control strings, which `marks`
        collects."""
        if isinstance(value, str):
            return self._text.stand_ins(value, marks)
        if isinstance(value, Mapping):
            if value.get("type") == "image":
                return {"type": "image"}
            return {
                key: inner if key == "role" else self._escaped(inner, marks)
                for key, inner in value.items()
            }
        return (
            [self._escaped(inner, marks) for inner in value] if isinstance(value, list) else value
        )


def _is_plain_answer(message: Message) -> bool:
    return (
        message["role"] == "assistant"
        and isinstance(message.get("content"), str)
        and len(message) == 2
    )
