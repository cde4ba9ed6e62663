"""Splits a prompt that is one string with a chat template's control tokens into messages with roles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_OPENINGS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n?"),  # ChatML: Qwen and many others
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n*"),  # Llama 3
    re.compile(r"<start_of_turn>(?P<role>\w+)\n"),  # Gemma
    re.compile(r"<\|(?P<role>system|user|assistant|observation|tool)\|>\n?"),  # GLM, Phi
)
_CLOSINGS = re.compile(r"(<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>)\s*$")
_ROLES = {"model": "assistant", "observation": "tool"}


def split_template(text: str) -> list[dict[str, str]]:
    """The messages of a rendered prompt; a single user message if no known template is recognised.

    The opening of the answer, with which most prompts end, is left out.
    """
    for opening in _OPENINGS:
        found = list(opening.finditer(text))
        if found:
            break
    else:
        return [{"role": "user", "content": text}]
    ends = [match.start() for match in found[1:]] + [len(text)]
    messages = []
    for match, end in zip(found, ends, strict=True):
        content = _CLOSINGS.sub("", text[match.end() : end])
        role = match["role"].lower()
        messages.append({"role": _ROLES.get(role, role), "content": content.strip("\n")})
    if messages[-1]["role"] == "assistant" and messages[-1]["content"].strip() in ("", "<think>"):
        messages.pop()
    return messages or [{"role": "user", "content": text}]


def split_prompts(episode: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The episode's distinct messages, and its turns with `prompt` as indexes into them.

    A prompt may also be one string, or a list that contains messages themselves.
    """
    messages: list[dict[str, Any]] = [dict(message) for message in episode.get("messages") or ()]
    places: dict[str, int] = {}
    story = []
    for turn in episode["story"]:
        prompt = turn.get("prompt")
        if isinstance(prompt, str):
            prompt = split_template(prompt)
        story.append({**turn, "prompt": list(_indexes(prompt or (), messages, places))})
    return messages, story


def _indexes(prompt: Any, messages: list[dict[str, Any]], places: dict[str, int]) -> Iterator[int]:
    for entry in prompt:
        if isinstance(entry, int):
            if 0 <= entry < len(messages):
                yield entry
            continue
        key = repr(entry)
        if key not in places:
            places[key] = len(messages)
            messages.append(dict(entry))
        yield places[key]
