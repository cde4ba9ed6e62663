"""Recognises requests that continue an earlier one, so that the model's own tokens can stay in the
prompt.

A program sends the conversation again with every request: the messages of an earlier request, the
response to it, and new messages. Many change the response on the way: they fill in a tool's
default, or leave out a needless `cd`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.agent.parts import Message

_CHANGES_FOLDER = re.compile(r"\Acd \S+ && ")
"""Claude Code sends a command back without it if the command would run in that folder anyway."""


@dataclass(frozen=True)
class _Answered:
    tools: bytes
    """Digest of the tools on offer."""
    digests: tuple[bytes, ...]
    """Of the messages as the program sent them."""
    shown: tuple[Message, ...]
    response: Message
    spelled: Message
    """The response with its arguments as the model spelled them."""


class Continued:
    """The requests of one episode that were answered, in order; each is one turn."""

    def __init__(self) -> None:
        self._answered: list[_Answered] = []
        self._tools = b""
        self._digests: tuple[bytes, ...] = ()
        self._shown: tuple[Message, ...] = ()

    def show(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        decode: Callable[[Sequence[Message]], list[Message]],
    ) -> tuple[list[Message], tuple[int, int] | None]:
        """Return a request's messages, with images that `decode` has read, and what it `continues`.

        `continues` has two numbers: the turn, and the first message after its response; None if it
        continues no turn with the same tools. The messages of that turn, and its response as the
        model spelled it, replace the program's copies.
        """
        self._tools = _digest(tools)
        digests = tuple(map(_digest, messages))
        continues = None
        shown = tuple[Message, ...]()
        for turn in reversed(range(len(self._answered))):
            earlier = self._answered[turn]
            sent = len(earlier.digests)
            is_longer = len(messages) > sent + 1 and digests[:sent] == earlier.digests
            if (
                is_longer
                and self._tools == earlier.tools
                and _is_same(messages[sent], earlier.response)
            ):
                continues = turn, sent + 1
                shown = (*earlier.shown, earlier.spelled)
                break
        self._digests = digests
        self._shown = (*shown, *decode(messages[len(shown) :]))
        return list(self._shown), continues

    def answered(self, response: Message, spelled: Message | None = None) -> None:
        """Note the response to the request that was shown last, as the message in which it was
        read.

        `spelled` is the same message with the arguments as the model spelled them, if they differ.
        """
        answered = _Answered(self._tools, self._digests, self._shown, response, spelled or response)
        self._answered.append(answered)


def _digest(sent: Any) -> bytes:
    return hashlib.blake2b(json.dumps(sent, sort_keys=True).encode(), digest_size=16).digest()


def _is_same(sent: Message, response: Message) -> bool:
    """Whether the program sends the response back: its text and reasoning, and calls that lack no
    argument."""
    if sent["role"] != "assistant" or (sent["content"] or "") != response["content"]:
        return False
    if sent.get("reasoning_content", "") != response.get("reasoning_content", ""):
        return False
    theirs = sent.get("tool_calls", ())
    ours = response.get("tool_calls", ())
    return len(theirs) == len(ours) and all(map(_is_same_call, theirs, ours))


def _is_same_call(sent: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    given = sent["function"]
    written = call["function"]
    arguments = given["arguments"]
    if given["name"] != written["name"] or not isinstance(arguments, Mapping):
        return False
    for name, value in written["arguments"].items():
        if name not in arguments:
            return False
        short = _CHANGES_FOLDER.sub("", value) if isinstance(value, str) else value
        if arguments[name] not in (value, short):
            return False
    return True
