"""A response as environments read it: thoughts between `<think>` tags, and where each character
comes from.

gpt-oss writes messages on channels between control tokens; they become thoughts, calls and text
here.
"""

import json
import re
from dataclasses import dataclass, field

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END_OF_MESSAGE = "<|end|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_THOUGHTS = "analysis"


@dataclass
class Reading:
    """The text for an environment, and the pieces of it that are the model's own."""

    text: str = ""
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """[start, end) in `text`, and where this begins in the response."""

    def write(self, words: str) -> None:
        """Add words that the model did not write."""
        self.text += words

    def copy(self, response: str, start: int, end: int) -> None:
        """Add the response's characters [start, end)."""
        self.pieces.append((len(self.text), len(self.text) + end - start, start))
        self.text += response[start:end]

    def own_span(self, span: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return where the response has the characters [start, end) of `text`; None if it has none
        of them."""
        if span is None:
            return None
        shared = [
            (max(a, span[0]) - a + at, min(b, span[1]) - a + at)
            for a, b, at in self.pieces
            if b > span[0]
        ]
        shared = [(start, end) for start, end in shared if start <= end]
        return (shared[0][0], shared[-1][1]) if shared else None


def plain_reading(response: str, opened: str) -> Reading:
    """Read a response whose thoughts are between tags already, but for what its header `opened`."""
    reading = Reading(opened)
    reading.copy(response, 0, len(response))
    return reading


def channel_reading(response: str) -> Reading:
    """Read a response of messages on channels, without the token that ended it."""
    reading = Reading()
    at = 0
    while at < len(response):
        end = response.find(END_OF_MESSAGE, at)
        ended = end >= 0
        end = end if ended else len(response)
        _read_message(reading, response, at, end, ended)
        at = end + len(END_OF_MESSAGE)
    return reading


def _read_message(reading: Reading, response: str, start: int, end: int, ended: bool) -> None:
    """Add one message, whose header tells its channel and whom it is for."""
    body = response.find(MESSAGE, start, end)
    if body < 0:
        if CHANNEL not in response[start:end]:
            reading.copy(response, start, end)
        return
    header = response[start:body]
    body = body + len(MESSAGE)
    recipient = _RECIPIENT.search(header)
    channel = header.partition(CHANNEL)[2].split(maxsplit=1)
    if recipient is not None:
        reading.write(f'<tool_call>\n{{"name": {json.dumps(recipient[1])}, "arguments": ')
        reading.copy(response, body, end)
        reading.write("}\n</tool_call>" if response[body:end].strip() else "{}}\n</tool_call>")
    elif channel and channel[0].startswith(_THOUGHTS):
        reading.write("<think>")
        reading.copy(response, body, end)
        reading.write("</think>" if ended else "")
    else:
        reading.copy(response, body, end)
