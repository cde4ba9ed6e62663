"""One chat template with its tools: renders conversations, and learns once what it writes around
and between them."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from rollout.errors import EncodingError

Message = dict[str, Any]

START, GENERATION, END = "start", "generation", "end"
"""Neighbours that are not messages: the conversation's start, the generation header, the
conversation's end."""
RECENT = "recent"
"""A response after the last user message, whose header may differ from that of earlier ones."""

LEFT, RIGHT = "\U0010fff1", "\U0010fff2"
"""Private-use characters that stand for the contents of the left and the right message."""

DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
FIXED_DATE = datetime.datetime(2024, 7, 26)
"""Replaces today's date, with which ids would change overnight; `date_string` in the kwargs has
precedence."""

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "t"}

PADDED = ("\n  a b\t\n", "l1\n\n l2 ", 'say "x\\y" <b> é')
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
"""How thoughts are written in what environments read, whatever the model's own tokens are."""
CALL_IDS = ("functions.{name}:{number}", "12345{number:04d}")
"""Ids of calls: Kimi's, which hold the name, and nine letters and digits, which Mistral demands."""


class ChatTemplate:
    """One template with its tools and keyword arguments; `control` matches the tokenizer's control
    tokens in a text."""

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
        self.control = control
        self.source = DATE_CALL.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), template)
        self.tools = list(tools) if tools else None
        self.names_in_ids = False
        """Calls show their ids in place of their names, so ids must hold the names (Kimi's
        `functions.name:0`)."""
        self.between = lru_cache(1024)(self._between)
        self.text_rule = lru_cache(64)(self._text_rule)

    def render(
        self, messages: Sequence[Message], *, generation: bool = False, tools: bool = True
    ) -> str:
        """Return the template's text of a conversation; raises EncodingError, which names the
        roles."""
        try:
            return self._tokenizer.apply_chat_template(
                _with_named_ids(messages) if self.names_in_ids else list(messages),
                tools=self.tools if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation,
                **self._kwargs,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
        ) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise EncodingError(
                f"the chat template refuses a conversation of roles ({roles}): {error}. Change the "
                "messages, or set another chat template in the checkpoint's tokenizer_config.json"
            ) from error

    def attempt(
        self, messages: Sequence[Message], *, generation: bool = False, tools: bool = True
    ) -> str | None:
        """Render a conversation; None if the template refuses it."""
        try:
            return self.render(messages, generation=generation, tools=tools)
        except EncodingError:
            return None

    def shows(self, messages: Sequence[Message], *, in_order: bool = False) -> bool:
        """Whether the template accepts this conversation and shows the text of every message."""
        text = self.attempt([{**m, "content": f"<{i}>"} for i, m in enumerate(messages)]) or ""
        places = [text.find(f"<{i}>") for i in range(len(messages))]
        return min(places) >= 0 and (not in_order or places == sorted(places))

    def check_tools(self, appended: bool) -> None:
        """Raise EncodingError unless the template shows tools and results, with `appended` also
        after model text."""
        if self.render([USER]) == self.render([USER], tools=False):
            raise EncodingError(
                "the chat template ignores tools, so the model would never see them; describe "
                "them in the system prompt, or set a chat template with tools"
            )
        result = {**TOOL, "content": LEFT, "name": "f"}
        if LEFT not in (self.with_call([USER], calls=[("f", {})], after=[result]) or ""):
            raise EncodingError(
                "the chat template does not show tool results; set a chat template with tools"
            )
        if appended and not self.shows([USER, ASSISTANT, {**TOOL, "name": "f"}, ASSISTANT, USER]):
            raise EncodingError(
                "the chat template takes tool results only after structured tool calls, but "
                "history: full appends them to the model's own text; describe the tools in the "
                "prompt (tools_in: prompt), use history: window, or set another chat template"
            )

    def with_call(
        self,
        messages: Sequence[Message],
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        after: Sequence[Message] = (),
        content: str = "",
    ) -> str | None:
        """Render a response with structured calls after `messages`, with ids that the template
        accepts; else None."""
        for form in CALL_IDS:
            ids = [form.format(name=name, number=number) for number, (name, _) in enumerate(calls)]
            functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
            made = [
                {"type": "function", "id": i, "function": f}
                for i, f in zip(ids, functions, strict=True)
            ]
            results = [{**m, "tool_call_id": ids[0]} if m["role"] == "tool" else m for m in after]
            answer = {"role": "assistant", "content": content, "tool_calls": made}
            if (text := self.attempt([*messages, answer, *results])) is not None:
                return text
        return None

    # Learnt from short conversations.

    def _between(self, left: str, right: str) -> str | None:
        """Return the text between the contents of `left` and `right`; None if it cannot be
        learnt."""
        messages = [
            *before(left, False),
            *_marked(left, LEFT),
            *_marked(right, RIGHT),
            *after(right),
        ]
        text = self.attempt(
            messages, generation=right == GENERATION, tools=left in (START, "system")
        )
        if text is None:
            return None
        begin = 0 if left == START else _once(text, LEFT) + 1
        end = len(text) if right in (GENERATION, END) else _once(text, RIGHT)
        return text[begin:end] if (left == START or begin) and begin <= end else None

    def _shown(self, role: str, content: Any) -> str | None:
        return self.attempt(
            [*before(role, False), {"role": role, "content": content}, *after(role)]
        )

    def _text_rule(self, role: str) -> Callable[[str], str] | None:
        """What the template does to texts in this role, nothing or `str.strip`; None for anything
        else."""
        around = self._shown(role, LEFT)
        shown = {text: self._shown(role, text) for text in PADDED}
        if around is None:
            return None
        for rule in (str, str.strip):
            if all(around.replace(LEFT, rule(text)) == found for text, found in shown.items()):
                return rule
        return None

    def image_text(self) -> str | None:
        """What the template writes for an image in a user message, the same for each; None if it
        shows no images."""
        left = {"type": "text", "text": LEFT}
        image = {"type": "image"}
        right = {"type": "text", "text": RIGHT}
        text = self._shown("user", [left, image, right, image, left]) or ""
        first, _, rest = text.partition(LEFT)[2].partition(RIGHT)
        if first and first != (second := rest.partition(LEFT)[0]):
            differ = f"the chat template writes {first!r} for the first picture and {second!r} for the second"
            raise EncodingError(
                f"{differ}; leave out what numbers them in chat_template_kwargs (add_vision_id)"
            )
        return first or None


def _with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """Number all calls and put their names into their ids, and into those of their results."""
    named: dict[str, str] = {}
    out: list[Message] = []
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                identity = CALL_IDS[0].format(name=call["function"]["name"], number=count)
                named[str(call.get("id"))] = identity
                calls.append({**call, "id": identity})
                count += 1
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in named:
            message = {**message, "tool_call_id": named[message["tool_call_id"]]}
        out.append(message)
    return out


def before(role: str, seen_tool: bool) -> list[Message]:
    """The shortest conversation that a message of this role may follow."""
    earlier = [USER, ASSISTANT, TOOL, ASSISTANT] if seen_tool else []
    return earlier + {"assistant": [USER], "tool": [USER, ASSISTANT]}.get(role, [])


def after(role: str) -> list[Message]:
    """What must follow a message of this role."""
    return {"assistant": [USER], "system": [USER], RECENT: [TOOL]}.get(role, [])


def common_start(texts: Sequence[str]) -> str:
    """The longest text with which all begin."""
    shortest = min(texts, key=len)
    for at, letter in enumerate(shortest):
        if any(text[at] != letter for text in texts):
            return shortest[:at]
    return shortest


def _marked(kind: str, mark: str) -> list[Message]:
    role = "assistant" if kind == RECENT else kind
    return [] if kind in (START, GENERATION, END) else [{"role": role, "content": mark}]


def _once(text: str, mark: str) -> int:
    """Position of the mark if it occurs exactly once, else -1."""
    return text.index(mark) if text.count(mark) == 1 else -1
