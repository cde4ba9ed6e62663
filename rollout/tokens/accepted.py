"""Messages in a form that a chat template accepts, with responses as the text that the model
wrote."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from envs.calls import find_calls, outside_thoughts
from rollout.errors import EncodingError
from rollout.tokens.chat_template import (
    END,
    LEFT,
    RIGHT,
    THOUGHT_END,
    THOUGHT_START,
    USER,
    ChatTemplate,
    Message,
)
from rollout.tokens.profile import REASONING_KEYS, Profile

MAX_CALLS = 64
"""Calls of an earlier response that are shown as calls."""


class AcceptedMessages:
    """Rearranges messages for one template.

    - System messages that the template refuses, drops or moves are joined with the first one, or
      become the user's.
    - Where roles must alternate, consecutive user messages are joined.
    - A response's calls and thought become part of its text, unless the template has control tokens
      for them.
    """

    def __init__(self, template: ChatTemplate, profile: Profile) -> None:
        self._template = template
        self._profile = profile
        self._answer_text = lru_cache(1024)(self._rendered_answer)

    def __call__(
        self, messages: Sequence[Message], *, as_text: bool = True, appended: bool = False
    ) -> list[Message]:
        """Return the messages in a form that the template accepts; raises EncodingError without
        messages.

        Without `as_text`, calls and thoughts of responses stay what they are. `appended`: they
        follow a response.
        """
        if not messages:
            raise EncodingError("a prompt needs at least one message")
        plain = [self._plain(message, as_text) for message in messages]
        if not self._profile.takes_systems:
            roles = [message["role"] for message in plain]
            can_open = not (appended or self._profile.refuses_system)
            opening = (
                next((i for i, role in enumerate(roles) if role != "system"), len(plain))
                if can_open
                else 0
            )
            plain = [
                *([joined(plain[:opening])] if opening else ()),
                *_told_by_user(plain[opening:]),
            ]
        return merged(plain) if self._profile.alternates else plain

    def _plain(self, message: Message, as_text: bool) -> Message:
        """The message without empty keys and without keys that the template does not mention."""
        source = self._template.source
        keys = {
            k
            for k, v in message.items()
            if v is not None and (k in ("role", "content") or k in source)
        }
        keys -= set(REASONING_KEYS)
        content = message.get("content")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        plain = {k: content if k == "content" else v for k, v in message.items() if k in keys}
        thought = next((message[k] for k in REASONING_KEYS if message.get(k)), None)
        if thought is not None:
            plain |= {k: thought for k in REASONING_KEYS if k in source}
        if not as_text:
            return {**plain, "content": ""} if content is None else plain
        if plain["role"] != "assistant":
            return plain
        if plain.get("tool_calls") and self._profile.needs_calls:
            return {**plain, "content": content or ""}
        if len(plain) > 2 or content is None:
            text = self._answer_text(json.dumps(plain, ensure_ascii=False))
            return plain if text is None else {"role": "assistant", "content": text}
        return self._as_shown(plain) if isinstance(content, str) else plain

    def _as_shown(self, message: Message) -> Message:
        """A response of text alone, as later prompts show it."""
        if (
            self._profile.calls_are_control
            and (shown := self._structured(message["content"])) is not None
        ):
            return shown
        return (
            {**message, "content": self._complete(message["content"])}
            if self._profile.opens_thought
            else message
        )

    def _structured(self, content: str) -> Message | None:
        """A response whose calls only the template may write, with these apart; None without such
        calls."""
        profile = self._profile
        if profile.channels:
            begin, end = outside_thoughts(content)
            content = content[begin:end]
        found = find_calls(content, MAX_CALLS, profile.call_form)
        if not found.valid or found.span is None or (profile.channels and len(found.calls) > 1):
            return {"role": "assistant", "content": content} if profile.channels else None
        calls = [
            {
                "type": "function",
                "id": f"c{number:08d}",
                "function": {"name": c.name, "arguments": dict(c.arguments)},
            }
            for number, c in enumerate(found.calls)
        ]
        text = content[: found.span[0]] + content[found.span[1] :]
        return {"role": "assistant", "content": self._complete(text).strip(), "tool_calls": calls}

    def _complete(self, content: str) -> str:
        """The text of a response with the beginning of its thought, if the header of its prompt had
        it."""
        opened = (
            self._profile.opens_thought and THOUGHT_END in content and THOUGHT_START not in content
        )
        return self._profile.lead + content if opened else content

    def _rendered_answer(self, message: str) -> str | None:
        """The text of a response with calls or reasoning, as the template writes it; None if it
        cannot be isolated."""
        given = json.loads(message)
        thinks = any(given.get(k) for k in REASONING_KEYS) or THOUGHT_END in str(
            given.get("content")
        )
        # Templates drop the reasoning of an earlier response; some strip the text of the last
        # response.
        right = END if thinks else "user"
        following = [{"role": "user", "content": RIGHT}] if right == "user" else []
        before = self._template.between("user", "assistant")
        after = self._template.between("assistant", right)
        text = self._template.attempt([{**USER, "content": LEFT}, given, *following], tools=False)
        if text is None or before is None or after is None:
            return None
        text = text[text.index(LEFT) + 1 :].split(RIGHT)[0]
        header = before if text.startswith(before) else self._profile.without_lead(before)
        if not (text.startswith(header) and text.endswith(after)):
            return None
        text = text.removeprefix(header).removesuffix(after)
        return None if self._template.control.search(text) else text


def _told_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with system messages as the user's, joined with the user message beside
    them."""
    out: list[Message] = []
    was_system = False
    for message in messages:
        is_system = message["role"] == "system"
        told = {**message, "role": "user"} if is_system else message
        if out and (is_system or was_system) and out[-1]["role"] == told["role"] == "user":
            out[-1] = joined([out[-1], told])
        else:
            out.append(told)
        was_system = is_system
    return out


def merged(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive user messages."""
    out: list[Message] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] == "user":
            out[-1] = joined([out[-1], message])
        else:
            out.append(message)
    return out


def joined(messages: Sequence[Message]) -> Message:
    """Return one message with the contents of all, with a blank line between them."""
    first, *others = messages
    for message in others:
        before = first["content"]
        content = message["content"]
        if isinstance(before, str) and isinstance(content, str):
            content = f"{before}\n\n{content}"
        else:
            content = [*_as_parts(before), {"type": "text", "text": "\n\n"}, *_as_parts(content)]
        first = {**first, **message, "content": content}
    return first


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
