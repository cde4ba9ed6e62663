"""Conversations put together from the template's learnt frames and the messages' own texts, without rendering.

A composition is trusted only after one of its kind (the same neighbours) equalled the rendered conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from envs.plain_text import Frame, PlainText
from rollout.tokens.chat_template import GENERATION, ChatTemplate, Message
from rollout.tokens.images import EncodedImage
from rollout.tokens.one_shot import OneShot

Part = Frame | str | EncodedImage
Neighbours = frozenset[tuple[str, int, str, bool]]


class Composer:
    """Composes parts for one template; remembers which kinds of conversation it may compose."""

    def __init__(self, template: ChatTemplate, text: PlainText, one_shot: OneShot) -> None:
        self._template = template
        self._text = text
        self._one_shot = one_shot
        self._frames: dict[tuple[str, str, bool], Frame | None] = {}
        self._trusted: dict[Neighbours, bool] = {}

    def compose(
        self,
        left: str,
        messages: Sequence[Message],
        rendered: Callable[[], Sequence[Part]],
        seen_tool: bool = False,
    ) -> Sequence[Part]:
        """Parts from the end of `left` up to the next answer; `rendered` gives them where frames will not do."""
        composed = self._parts(left, messages, seen_tool)
        if composed is None:
            return rendered()
        parts, neighbours = composed
        trusted = self._trusted.get(neighbours)
        if trusted is None:
            same = self._text.join(expanded(parts)) == self._text.join(expanded(rendered()))
            trusted = self._trusted[neighbours] = same
        return parts if trusted else rendered()

    def frame(self, left: str, right: str, seen_tool: bool = False) -> Frame | None:
        """What the template writes between two neighbours; None where that cannot be told."""
        key = (left, right, seen_tool)
        if key not in self._frames:
            text = self._template.between(left, "", right, seen_tool)
            self._frames[key] = None if text is None else self._text.frame(text)
        return self._frames[key]

    def _around(self, left: str, inner: list[Message], right: str, seen_tool: bool) -> Frame | None:
        """The frame with messages in between that are more than a role and a text."""
        try:
            given = json.dumps(inner, ensure_ascii=False)
        except TypeError:
            return None
        text = None if self._text.pattern.search(given) else self._template.between(left, given, right, seen_tool)
        return None if text is None else self._text.frame(text)

    def _parts(
        self, left: str, messages: Sequence[Message], seen_tool: bool
    ) -> tuple[list[Part], Neighbours] | None:
        """Frames and contents in turn, up to the generation header; None where only rendering will do."""
        parts: list[Part] = []
        neighbours: set[tuple[str, int, str, bool]] = set()
        inner: list[Message] = []
        runs = 0
        for index, message in enumerate([*messages, None]):
            content = None if message is None else self._content(message, index)
            if message is not None and content is None:
                inner.append(message)
                continue
            right = GENERATION if message is None else message["role"]
            seen = seen_tool and right == "tool"
            frame = self._around(left, inner, right, seen) if inner else self.frame(left, right, seen)
            if frame is None:
                return None
            runs += bool(inner)
            neighbours.add((left, min(runs, 2) if inner else 0, right, seen))
            parts += [frame, *(content or ())]
            seen_tool |= right == "tool"
            left, inner = right, []
        return parts, frozenset(neighbours)

    def _content(self, message: Message, index: int) -> list[Part] | None:
        """The message's text and pictures as the template shows them; None if there is more to it."""
        content, role = message.get("content"), message["role"]
        if len(message) != 2 or (role == "system" and index):
            return None
        if isinstance(content, str):
            rule = self._template.content_rule(role)
            return None if rule is None else [content.strip() if rule == "strip" else content]
        if not isinstance(content, list) or not self._template.lists_are_verbatim(role):
            return None
        return [self._one_shot.picture(p["image"]) if p.get("type") == "image" else p["text"] for p in content]


def expanded(parts: Sequence[Part]) -> list[Frame | str]:
    """The parts as training sees them: pictures by all their placeholder tokens."""
    return [part.expanded if isinstance(part, EncodedImage) else part for part in parts]


def unexpanded(parts: Sequence[Part]) -> list[Frame | str]:
    """The parts as the engine wants them: pictures by one placeholder."""
    return [part.placeholder if isinstance(part, EncodedImage) else part for part in parts]


def without_first(token: int, parts: Sequence[Part]) -> Sequence[Part]:
    """The parts after `token`, if they begin with it."""
    first = parts[0]
    if not isinstance(first, Frame) or first.ids is None or first.ids[0] != token:
        return parts
    if len(first.ids) == 1:
        return [first.tail.lstrip() if first.strip_after else first.tail, *parts[1:]]
    return [Frame("", first.ids[1:], first.tail, False, first.strip_after), *parts[1:]]
