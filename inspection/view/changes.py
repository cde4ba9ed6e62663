"""Finds what each prompt of an episode shows for the first time.

With a memory window, most of a prompt repeats earlier prompts: past observations under another heading, and past
answers. A reader needs only the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

_COMPARED_PROMPTS = 3


def find_changes(messages: Sequence[Mapping[str, Any]], story: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """For each turn, the indexes of the messages in its prompt that are news; the last message always is.

    Args:
        messages: the episode's distinct messages.
        story: its turns; `prompt` holds indexes into `messages`.
    """
    seen: set[int] = set()
    recent: deque[str] = deque(maxlen=_COMPARED_PROMPTS)
    changes = []
    for turn in story:
        prompt = turn["prompt"]
        fresh = [i for i in prompt[:-1] if i not in seen and not (seen and _is_memory(messages[i], recent))]
        fresh += prompt[-1:]
        seen.update(prompt)
        recent.append("\n".join(text_of(messages[i]) for i in fresh))
        changes.append(fresh)
    return changes


def _is_memory(message: Mapping[str, Any], recent: deque[str]) -> bool:
    """Whether a message repeats an earlier answer or observation."""
    if message.get("role") == "assistant":
        return True
    text = text_of(message)
    heading, _, rest = text.partition("\n")
    body = (rest if heading.rstrip().endswith(":") else text).strip()
    return any(body in earlier for earlier in recent)


def text_of(message: Mapping[str, Any]) -> str:
    """The message's text without its pictures."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))
