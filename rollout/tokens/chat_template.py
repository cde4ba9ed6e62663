"""What a chat template writes around and between messages, learnt once by rendering short conversations."""

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
"""Neighbours that are not messages: the conversation's start, the generation header, the conversation's end."""

LEFT, RIGHT = "\U0010fff1", "\U0010fff2"
"""Private-use characters that stand for the contents of the left and the right message."""

DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
FIXED_DATE = datetime.datetime(2024, 7, 26)
"""Replaces today's date, with which ids would change overnight; `date_string` in the kwargs has precedence."""

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "t"}

PADDED = ("\n  a b\t\n", " ", "l1\n\n l2 ", 'say "x\\y" <b> é')
REASON = "because"
THOUGHTS = (f"<think>\n{REASON}\n</think>\n\nso", f"<think>{REASON}</think>so")
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """One template with its tools and keyword arguments; `control` matches the tokenizer's control tokens in a text."""

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
        text = self._try([USER, {**ASSISTANT, "content": THOUGHTS[0]}, USER])
        self.drops_reasoning = text is not None and REASON not in text
        header, text = self.between("user", "", "assistant", False), self._try([USER, {**ASSISTANT, "content": RIGHT}])
        self.reasoning_lead = text.split(RIGHT)[0].rpartition(header)[2] if text and header and header in text else ""
        """Text that the template writes before the last response, but not earlier ones (Qwen3's empty think block)."""

    def render(self, messages: Sequence[Message], *, generation: bool = False, tools: bool = True) -> str:
        """Return the template's text of a conversation; raises EncodingError, which names the roles."""
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

    def _try(self, messages: Sequence[Message], *, generation: bool = False, tools: bool = True) -> str | None:
        try:
            return self.render(messages, generation=generation, tools=tools)
        except EncodingError:
            return None

    def shows(self, messages: Sequence[Message]) -> bool:
        """Whether the template accepts this conversation and shows the text of every message."""
        text = self._try([{**m, "content": f"<{i}>"} for i, m in enumerate(messages)])
        return text is not None and all(f"<{i}>" in text for i in range(len(messages)))

    def check_tools(self, appended: bool) -> None:
        """Raise EncodingError unless the template shows tools and results, with `appended` also after model text."""
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

    # Messages in the form that the template accepts.

    def accepted(self, messages: Sequence[Message], *, as_text: bool = True) -> list[Message]:
        """Return the messages in a form that the template accepts, without keys that it would not show.

        If the template rejects system messages, their text opens the first user message. If roles must alternate,
        consecutive user messages are joined. With `as_text`, a response's calls and reasoning become part of its text,
        as the model would write them. Raises EncodingError without messages.
        """
        if not messages:
            raise EncodingError("a prompt needs at least one message")
        shaped = [self._plain(message, as_text) for message in messages]
        if self.refuses_system and shaped[0]["role"] == "system":
            system, *rest = shaped
            shaped = [*_merged([{"role": "user", "content": system["content"]}, *rest[:1]]), *rest[1:]]
        return _merged(shaped) if self.alternates else shaped

    def _plain(self, message: Message, as_text: bool) -> Message:
        """The message without empty keys and without keys that the template does not mention."""
        mentioned = lambda k: any(name in self.source for name in (REASONING_KEYS if k in REASONING_KEYS else (k,)))
        keys = {k for k, v in message.items() if v is not None and (k in ("role", "content") or mentioned(k))}
        content = message.get("content")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        plain = {k: content if k == "content" else v for k, v in message.items() if k in keys}
        if not as_text:
            return {**plain, "content": ""} if content is None else plain
        if plain["role"] == "assistant" and (len(plain) > 2 or content is None):
            text = self._answer_text(json.dumps(plain, ensure_ascii=False))
            return plain if text is None else {"role": "assistant", "content": text}
        return plain

    def _rendered_answer(self, message: str) -> str | None:
        """The text of a response with calls or reasoning, as the template writes it; None if it cannot be isolated."""
        given = json.loads(message)
        reasons = any(given.get(k) for k in REASONING_KEYS) or THOUGHT_END in str(given.get("content"))
        # Templates drop the reasoning of an earlier response; some strip the text of the last response.
        right = END if reasons else "user"
        before, after = self.between("user", "", "assistant", False), self.between("assistant", "", right, False)
        text = self._try([{**USER, "content": LEFT}, given, *_marked(right, RIGHT)], tools=False)
        if text is None or before is None or after is None:
            return None
        text = text[text.index(LEFT) + 1 :].split(RIGHT)[0]
        if not (text.startswith(before) and text.endswith(after)):
            return None
        text = text.removeprefix(before).removesuffix(after)
        return None if self._control.search(text) else text

    # Learnt from short conversations.

    def _between(self, left: str, inner: str, right: str, seen_tool: bool) -> str | None:
        """Return the text between the contents of `left` and `right`; None if it cannot be learnt."""
        middle = json.loads(inner) if inner else []
        messages = [*before(left, seen_tool), *_marked(left, LEFT), *middle, *_marked(right, RIGHT), *after(right)]
        text = self._try(messages, generation=right == GENERATION, tools=left in (START, "system"))
        if text is None:
            return None
        begin = 0 if left == START else _once(text, LEFT) + 1
        end = len(text) if right in (GENERATION, END) else _once(text, RIGHT)
        return text[begin:end] if (left == START or begin) and begin <= end else None

    def _shown(self, role: str, content: Any) -> str | None:
        return self._try([*before(role, False), {"role": role, "content": content}, *after(role)])

    def _content_rule(self, role: str) -> str | None:
        """What the template does to a text in this role: `verbatim`, `strip`, or None for anything else."""
        around = self._shown(role, LEFT)
        rules = {"verbatim": lambda text: text, "strip": str.strip}
        probes = (*PADDED, *THOUGHTS) if role == "assistant" and not self.drops_reasoning else PADDED
        for content in probes:
            shown = self._shown(role, content)
            if around is None or shown is None:
                return None
            rules = {name: rule for name, rule in rules.items() if around.replace(LEFT, rule(content)) == shown}
        return next(iter(rules), None)

    def _lists_are_verbatim(self, role: str) -> bool:
        """Whether the template shows content parts one after the other, with their texts unchanged."""
        around = self._shown(role, LEFT)
        shown = self._shown(role, [{"type": "text", "text": text} for text in (PADDED[0], PADDED[2])])
        return around is not None and around.replace(LEFT, PADDED[0] + PADDED[2]) == shown

    def image_text(self) -> str | None:
        """What the template writes for an image in a user message, the same for each; None if it shows no images."""
        left, image, right = {"type": "text", "text": LEFT}, {"type": "image"}, {"type": "text", "text": RIGHT}
        text = self._shown("user", [left, image, right, image, left]) or ""
        first, _, rest = text.partition(LEFT)[2].partition(RIGHT)
        if first and first != (second := rest.partition(LEFT)[0]):
            differ = f"the chat template writes {first!r} for the first picture and {second!r} for the second"
            raise EncodingError(f"{differ}; leave out what numbers them in chat_template_kwargs (add_vision_id)")
        return first or None

    def generation_lead(self) -> str:
        """What the generation header adds to the header of an earlier response, such as an empty think block."""
        header, earlier = self.between("user", "", GENERATION, False), self.between("user", "", "assistant", False)
        return (header or "").removeprefix(earlier) if earlier and header and header.startswith(earlier) else ""


def before(role: str, seen_tool: bool) -> list[Message]:
    """The shortest conversation that a message of this role may follow."""
    earlier = [USER, ASSISTANT, TOOL, ASSISTANT] if seen_tool else []
    return earlier + {"assistant": [USER], "tool": [USER, ASSISTANT]}.get(role, [])


def after(role: str) -> list[Message]:
    """What must follow a message of this role."""
    return [USER] if role in ("assistant", "system") else []


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive user messages, with a blank line between them."""
    out: list[Message] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] == "user":
            first, second = out[-1]["content"], message["content"]
            if isinstance(first, str) and isinstance(second, str):
                content = f"{first}\n\n{second}"
            else:
                content = [*_as_parts(first), {"type": "text", "text": "\n\n"}, *_as_parts(second)]
            out[-1] = {**out[-1], **message, "content": content}
        else:
            out.append(message)
    return out


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _marked(kind: str, mark: str) -> list[Message]:
    return [] if kind in (START, GENERATION, END) else [{"role": kind, "content": mark}]


def _once(text: str, mark: str) -> int:
    """Position of the mark if it occurs exactly once, else -1."""
    return text.index(mark) if text.count(mark) == 1 else -1
