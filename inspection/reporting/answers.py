"""Splits an answer into the reasoning, the text that names the action, and what follows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envs.text_game import find_action

_LABEL = re.compile(r"\s*(?:THINK|THOUGHT|REASONING|<think>)\s*:?", re.IGNORECASE)
_WITHOUT_MARKER = re.compile(r"</think>|(?=<tool_call>)")
_LONGEST_TOKEN = 40
MOST_WORDS_OF_A_BARE_ACTION = 6
"""An answer without a marker and with more words than this counts as reasoning without an action."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of one answer."""

    reasoning: str
    """The text before the action, without the labels `THINK:` and `<think>`."""
    action: str
    """The first line of the text that is read as the action; empty if the answer has none."""
    after: str
    """The lines after the action."""
    has_marker: bool
    """Whether the answer says where its action begins (`ACTION:`, `</think>` or `<tool_call>`)."""


def split_answer(response: str, valid: bool) -> Answer:
    """Split as the games do (`envs.text_game.find_action`), else at `</think>` or `<tool_call>`.

    Without any marker, a valid or short answer is a bare action, and a longer one is reasoning without an action.
    """
    response = _drop_end_tokens(response)
    candidate, (start, _) = find_action(response)
    if start:
        return _make(response[:start], candidate)
    marker = _WITHOUT_MARKER.search(response)
    if marker:
        return _make(response[: marker.start()], response[marker.end() :])
    is_short = len(response.split(maxsplit=MOST_WORDS_OF_A_BARE_ACTION)) <= MOST_WORDS_OF_A_BARE_ACTION
    if valid or (is_short and not _LABEL.match(response)):
        action, _, after = response.strip().partition("\n")
        return Answer("", action.strip(), after.strip(), False)
    return Answer(_drop_labels(response), "", "", False)


def _make(before: str, tail: str) -> Answer:
    """The parts of an answer with a marker; `before` may end with the marker itself."""
    for word in ("ACTION:", "action:", "Action"):
        before = before.rstrip().removesuffix(word)
    action, _, after = tail.strip().partition("\n")
    return Answer(_drop_labels(before), action.strip(), after.strip(), True)


def _drop_labels(text: str) -> str:
    text = text[match.end() :] if (match := _LABEL.match(text)) else text
    return text.replace("<think>", "").replace("</think>", "").strip()


def _drop_end_tokens(text: str) -> str:
    """Without tokens such as `<|im_end|>` at the end."""
    while (text := text.rstrip()).endswith(("|>", "</s>")):
        start = text.rfind("<|" if text.endswith("|>") else "</s>", max(len(text) - _LONGEST_TOKEN, 0))
        if start < 0:
            break
        text = text[:start]
    return text
