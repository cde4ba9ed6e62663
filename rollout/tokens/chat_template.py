"""What a chat template does around messages, learnt by rendering it: its frames, its rules, its end of a turn.

A template is a program; what it writes between two neighbouring messages is learnt once from a short base
conversation with stand-ins for the contents, so that a turn needs no rendering.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from rollout.errors import EncodingError

Message = dict[str, Any]

START, GENERATION, END = "start", "generation", "end"
"""Neighbours that are not messages: the conversation's start, the header that asks for an answer, nothing more."""

LEFT, RIGHT = "\U0010fff1", "\U0010fff2"

DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
FIXED_DATE = datetime.datetime(2024, 7, 26)
"""Templates that print today's date would give other ids tomorrow; a `date_string` in the kwargs still wins."""

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "t"}

PADDED = ("\n  a b\t\n", " ", "l1\n\n l2 ", 'say "x\\y" <b> é')
REASON = "because"
THOUGHTS = (f"<think>\n{REASON}\n</think>\n\nso", f"<think>{REASON}</think>so")
THOUGHT_END = "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """One template with its tools and keyword arguments; what it does is asked by rendering and remembered.

    `control` finds the tokenizer's control tokens in a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        control: re.Pattern[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._control = control
        self.source = DATE_CALL.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), template)
        self.tools = list(tools) if tools else None
        self.between = lru_cache(1024)(self._between)
        self.content_rule = lru_cache(64)(self._content_rule)
        self.lists_are_verbatim = lru_cache(64)(self._lists_are_verbatim)
        self._answer_text = lru_cache(1024)(self._rendered_answer)
        self.refuses_system = not self.shows([SYSTEM, USER])
        self.alternates = not self.shows([USER, USER])
        self.drops_reasoning = self._drops_reasoning()
        self.reasoning_lead = self._reasoning_lead()

    def render(self, messages: Sequence[Message], *, generation: bool = False, tools: bool = True) -> str:
        """The template's text of a whole conversation.

        Raises:
            EncodingError: the template refuses it; says which roles were given.
        """
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=self.tools if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise EncodingError(
                f"the chat template refuses a conversation of roles ({roles}): {error}. Change the messages, or set "
                "another chat template in the checkpoint's tokenizer_config.json"
            ) from error

    def shows(self, messages: Sequence[Message]) -> bool:
        """Whether the template renders this conversation and shows every message's text."""
        try:
            text = self.render([{**m, "content": f"<{i}>"} for i, m in enumerate(messages)])
        except EncodingError:
            return False
        return all(f"<{i}>" in text for i in range(len(messages)))

    def check_tools(self, appended: bool) -> None:
        """Make sure that the template shows the tools and takes their results.

        `appended`: also that it takes a result after an answer that is text, which is all that the model's own
        tokens are.

        Raises:
            EncodingError: it does not; says what to do instead.
        """
        if self.render([USER]) == self.render([USER], tools=False):
            raise EncodingError(
                "the chat template ignores tools, so the model would never see them; describe them in the system "
                "prompt, or set a chat template with tools"
            )
        call = {"type": "function", "function": {"name": "f", "arguments": {}}, "id": "123456789"}
        result = {**TOOL, "content": LEFT, "tool_call_id": "123456789", "name": "f"}
        text = self.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result])
        if LEFT not in text:
            raise EncodingError("the chat template does not show tool results; set a chat template with tools")
        if appended and not self.shows([USER, ASSISTANT, result, ASSISTANT, USER]):
            raise EncodingError(
                "the chat template takes tool results only after structured tool calls, but history: full appends them "
                "to the model's own text; describe the tools in the prompt (tools_in: prompt), use history: window, "
                "or set another chat template"
            )

    # Messages in the form that the template takes.

    def accepted(self, messages: Sequence[Message], *, as_text: bool = True) -> list[Message]:
        """The messages as the template can take them, with nothing that it would not show.

        `as_text`: an answer's calls and reasoning become part of its text, as the model would have written them.

        A system message that the template refuses opens the first user message; where roles must alternate, user
        messages in a row become one, a blank line between them.

        Raises:
            EncodingError: no messages.
        """
        if not messages:
            raise EncodingError("a prompt needs at least one message")
        shaped = [self._plain(message, as_text) for message in messages]
        if self.refuses_system and shaped[0]["role"] == "system":
            system, *rest = shaped
            if rest and rest[0]["role"] == "user":
                shaped = [{**rest[0], "content": _joined(system["content"], rest[0]["content"])}, *rest[1:]]
            else:
                shaped = [{"role": "user", "content": system["content"]}, *rest]
        return self._alternating(shaped) if self.alternates else shaped

    def _alternating(self, messages: list[Message]) -> list[Message]:
        out: list[Message] = []
        for message in messages:
            if out and message["role"] == out[-1]["role"] == "user":
                out[-1] = {**out[-1], "content": _joined(out[-1]["content"], message["content"])}
            else:
                out.append(message)
        return out

    def _plain(self, message: Message, as_text: bool) -> Message:
        """The message without empty keys or keys that the template never names."""
        keys = {k for k, v in message.items() if v is not None and (k in ("role", "content") or self._names(k))}
        content = message.get("content")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        plain = {k: content if k == "content" else message[k] for k in message if k in keys}
        if not as_text:
            return {**plain, "content": ""} if content is None else plain
        if plain["role"] == "assistant" and (len(plain) > 2 or content is None):
            text = self._answer_text(json.dumps(plain, ensure_ascii=False))
            return plain if text is None else {"role": "assistant", "content": text}
        return plain

    def _names(self, key: str) -> bool:
        return any(k in self.source for k in (REASONING_KEYS if key in REASONING_KEYS else (key,)))

    def _rendered_answer(self, message: str) -> str | None:
        """Text of an answer that is more than text (calls, reasoning); None where it does not stand in its frame."""
        given = json.loads(message)
        reasons = any(given.get(k) for k in REASONING_KEYS) or THOUGHT_END in str(given.get("content"))
        # Templates drop the reasoning of an earlier answer, and some strip the text of a last one.
        text = self._between_users(given, END if reasons else "user")
        return None if text is None or self._control.search(text) else text

    def _between_users(self, answer: Message, right: str) -> str | None:
        """Text of the answer with a user message before it and `right` after it; None where its frame differs."""
        before, after = self.between("user", "", "assistant", False), self.between("assistant", "", right, False)
        try:
            text = self.render([{**USER, "content": LEFT}, answer, *_marked(right, RIGHT)], tools=False)
        except EncodingError:
            return None
        text = text[text.index(LEFT) + 1 :].split(RIGHT)[0]
        if before is None or after is None or not (text.startswith(before) and text.endswith(after)):
            return None
        return text.removeprefix(before).removesuffix(after)

    # Frames and rules, learnt from base conversations.

    def _between(self, left: str, inner: str, right: str, seen_tool: bool) -> str | None:
        """Text from the end of the left content to the start of the right one; None where that cannot be told.

        `inner` is the JSON of messages in between that are more than a role and a text (tool calls, say).
        """
        after: list[Message] = [USER] if right in ("assistant", "system") else []
        middle = json.loads(inner) if inner else []
        messages = [*before(left, seen_tool), *_marked(left, LEFT), *middle, *_marked(right, RIGHT), *after]
        try:
            text = self.render(messages, generation=right == GENERATION, tools=left in (START, "system"))
        except EncodingError:
            return None
        begin = 0 if left == START else _once(text, LEFT) + 1
        end = len(text) if right in (GENERATION, END) else _once(text, RIGHT)
        return text[begin:end] if (left == START or begin) and begin <= end else None

    def _content_rule(self, role: str) -> str | None:
        """What becomes of a text in this role: `verbatim`, `strip`, or None where the template does more to it."""
        after = [USER] if role in ("assistant", "system") else []
        rules = {"verbatim": lambda text: text, "strip": str.strip}
        probes = (*PADDED, *THOUGHTS) if role == "assistant" and not self.drops_reasoning else PADDED
        for content in probes:
            try:
                shown, frame = (
                    self.render([*before(role, False), {"role": role, "content": c}, *after]) for c in (content, LEFT)
                )
            except EncodingError:
                return None
            rules = {name: rule for name, rule in rules.items() if frame.replace(LEFT, rule(content)) == shown}
        return next(iter(rules), None)

    def _lists_are_verbatim(self, role: str) -> bool:
        """Whether content parts are shown one after the other, texts as they are."""
        parts = [{"type": "text", "text": PADDED[0]}, {"type": "text", "text": PADDED[2]}]
        after = [USER] if role in ("assistant", "system") else []
        try:
            shown, frame = (
                self.render([*before(role, False), {"role": role, "content": c}, *after]) for c in (parts, LEFT)
            )
        except EncodingError:
            return False
        return frame.replace(LEFT, PADDED[0] + PADDED[2]) == shown

    def image_text(self) -> str | None:
        """What the template writes for one picture in a user message; None if it shows none."""
        parts = [{"type": "text", "text": LEFT}, {"type": "image"}, {"type": "text", "text": RIGHT}]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except EncodingError:
            return None
        begin, end = _once(text, LEFT) + 1, _once(text, RIGHT)
        return text[begin:end] if 0 < begin < end else None

    def generation_lead(self) -> str:
        """What the generation header adds to the header of an earlier answer (an empty think block, say)."""
        header, earlier = self.between("user", "", GENERATION, False), self.between("user", "", "assistant", False)
        return (header or "").removeprefix(earlier) if earlier and header and header.startswith(earlier) else ""

    def _drops_reasoning(self) -> bool:
        reasoned = {**ASSISTANT, "content": THOUGHTS[0]}
        try:
            return REASON not in self.render([USER, reasoned, USER])
        except EncodingError:
            return False

    def _reasoning_lead(self) -> str:
        """What the template puts before a last answer, but not before an earlier one (Qwen3's empty think block)."""
        header = self.between("user", "", "assistant", False)
        try:
            text = self.render([USER, {**ASSISTANT, "content": RIGHT}])
        except EncodingError:
            return ""
        return text[: text.find(RIGHT)].rpartition(header)[2] if header and header in text else ""


def before(role: str, seen_tool: bool) -> list[Message]:
    """The base conversation after which a message of this role may come."""
    earlier = [USER, ASSISTANT, TOOL, ASSISTANT] if seen_tool else []
    match role:
        case "assistant":
            return [*earlier, USER]
        case "tool":
            return [*earlier, USER, ASSISTANT]
    return earlier


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one, a blank line between them; parts if either has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_as_parts(first), {"type": "text", "text": "\n\n"}, *_as_parts(second)]


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _marked(kind: str, mark: str) -> list[Message]:
    return [] if kind in (START, GENERATION, END) else [{"role": kind, "content": mark}]


def _once(text: str, mark: str) -> int:
    """Where the mark stands if it stands there once, else -1."""
    return text.index(mark) if text.count(mark) == 1 else -1
