"""Splits an answer into the reasoning, the text that names the action, and what follows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envs.text_game import find_action

_LABEL = re.compile(r"\s*(?:THINK|THOUGHT|REASONING|<think>)\s*:?", re.IGNORECASE)
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_LONGEST_TOKEN, _MOST_TOKENS = 40, 16
MOST_WORDS_OF_A_BARE_ACTION = 6
"""An answer without a marker and with more words than this counts as reasoning without an action."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of one answer."""

    reasoning: str
    """The text before the action, without the labels `THINK:` and `<think>`."""
    action: str
    """The text that is read as the action, on one line; empty if the answer has none."""
    after: str
    """The lines after the action, or after the last tool call."""
    has_marker: bool
    """Whether the answer says where its action begins (`ACTION:`, `</think>` or `<tool_call>`)."""


def split_answer(response: str, executed: str | None) -> Answer:
    """Split at the tool calls, else as the games do (`envs.text_game.find_action`), else at `</think>`.

    Without any marker, a short answer, or one that was executed as it stands, is a bare action. A longer one is
    reasoning, which contains the action if the answer is valid.

    Args:
        executed: the executed action; None if the answer is invalid.
    """
    response = _drop_end_tokens(response)
    calls = response.find(_CALL)
    if calls >= 0:
        end = response.rfind(_CALL_END)
        end = end + len(_CALL_END) if end > calls else len(response)
        return Answer(_drop_labels(response[:calls]), _one_line(response[calls:end]), response[end:].strip(), True)
    candidate, (start, _) = find_action(response)
    if start:
        before = response[:start].rstrip()
        for word in ("ACTION:", "action:", "Action"):
            before = before.removesuffix(word)
        action, _, after = candidate.partition("\n")
        return Answer(_drop_labels(before), action.strip(), after.strip(), True)
    thought, closed, rest = response.rpartition("</think>")
    if closed:
        return Answer(_drop_labels(thought), _one_line(rest), "", True)
    is_short = len(response.split(maxsplit=MOST_WORDS_OF_A_BARE_ACTION)) <= MOST_WORDS_OF_A_BARE_ACTION
    if (is_short and not _LABEL.match(response)) or _one_line(response) == _one_line(executed or ""):
        return Answer("", _one_line(response), "", False)
    return Answer(_drop_labels(response), _one_line(executed or ""), "", False)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _drop_labels(text: str) -> str:
    text = text[match.end() :] if (match := _LABEL.match(text)) else text
    return text.replace("<think>", "").replace("</think>", "").strip()


def _drop_end_tokens(text: str) -> str:
    """Without tokens such as `<|im_end|>` at the end."""
    for _ in range(_MOST_TOKENS):
        text = text.rstrip()
        if not text.endswith(("|>", "</s>")):
            break
        start = text.rfind("<|" if text.endswith("|>") else "</s>", max(len(text) - _LONGEST_TOKEN, 0))
        if start < 0:
            break
        text = text[:start]
    return text
