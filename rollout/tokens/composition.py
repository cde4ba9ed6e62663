"""Composes conversations from learnt template text and the messages' own text, without rendering the template.

A kind of conversation (a set of neighbouring roles) is composed only after one of its kind equalled its rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache

from envs.plain_text import PlainText, TemplateText
from rollout.tokens.chat_template import GENERATION, ChatTemplate, Message
from rollout.tokens.images import Part, expanded
from rollout.tokens.one_shot import OneShot

Neighbours = frozenset[tuple[str, int, str, bool]]
"""For each pair of neighbours: left role, what stands between them, right role, whether a tool was seen before."""


class Composer:
    """Composes parts for one template, and remembers which kinds of conversation it may compose."""

    def __init__(self, template: ChatTemplate, text: PlainText, one_shot: OneShot) -> None:
        self._template = template
        self._text = text
        self._one_shot = one_shot
        self.between = lru_cache(1024)(self._between)
        self._trusted: dict[Neighbours, bool] = {}

    def compose(
        self,
        left: str,
        messages: Sequence[Message],
        rendered: Callable[[], Sequence[Part]],
        seen_tool: bool = False,
    ) -> Sequence[Part]:
        """Parts from the end of `left` to the next answer; calls `rendered` if they cannot be composed."""
        composed = self._parts(left, messages, seen_tool)
        if composed is None:
            return rendered()
        parts, neighbours = composed
        if neighbours not in self._trusted:
            same = self._text.join(expanded(parts)) == self._text.join(expanded(rendered()))
            self._trusted[neighbours] = same
        return parts if self._trusted[neighbours] else rendered()

    def _between(self, left: str, right: str, seen_tool: bool = False, inner: str = "") -> TemplateText | None:
        """What the template writes between two neighbours, or None if that cannot be learnt.

        `inner` is the JSON of messages between them that hold more than a role and a text, such as tool calls.
        """
        learnable = not self._text.pattern.search(inner)
        text = self._template.between(left, inner, right, seen_tool) if learnable else None
        return None if text is None else self._text.template_text(text)

    def _parts(self, left: str, messages: Sequence[Message], seen_tool: bool) -> tuple[list[Part], Neighbours] | None:
        """Template text and contents up to the generation header; None if the conversation must be rendered."""
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
            given = _json(inner) if inner else ""
            written = None if given is None else self.between(left, right, seen, given)
            if written is None:
                return None
            runs += bool(inner)
            neighbours.add((left, min(runs, 2) if inner else 0, right, seen))
            parts += [written, *(content or ())]
            seen_tool |= right == "tool"
            left, inner = right, []
        return parts, frozenset(neighbours)

    def _content(self, message: Message, index: int) -> list[Part] | None:
        """The message's text and pictures as the template shows them; None if it has more than those."""
        content, role = message.get("content"), message["role"]
        if len(message) != 2 or (role == "system" and index):
            return None
        if isinstance(content, str):
            rule = self._template.content_rule(role)
            return None if rule is None else [content.strip() if rule == "strip" else content]
        if not isinstance(content, list) or not self._template.lists_are_verbatim(role):
            return None
        return [self._one_shot.picture(p["image"]) if p.get("type") == "image" else p["text"] for p in content]


def _json(messages: Sequence[Message]) -> str | None:
    try:
        return json.dumps(messages, ensure_ascii=False)
    except TypeError:  # pictures, for example
        return None
