"""Reads a recorded episode's prompts: messages with roles, and what each prompt shows for the first time."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
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
    """Return the messages of a rendered prompt; a single user message if no known template is recognised.

    The opening of the response, with which most prompts end, is left out.
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
    """Return the episode's distinct messages, and its turns with `prompt` as indexes into them.

    A prompt may also be one string, or a list that contains messages themselves.
    """
    messages: list[dict[str, Any]] = [dict(message) for message in episode.get("messages") or ()]
    places: dict[str, int] = {}
    turns = []
    for turn in episode["story"]:
        prompt, indexes = turn.get("prompt"), []
        for entry in split_template(prompt) if isinstance(prompt, str) else prompt or ():
            if isinstance(entry, int):
                indexes += [entry] if 0 <= entry < len(messages) else []
                continue
            key = repr(entry)
            if key not in places:
                places[key] = len(messages)
                messages.append(dict(entry))
            indexes.append(places[key])
        turns.append({**turn, "prompt": indexes})
    return messages, turns


def find_changes(messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """For each turn, the indexes of the messages in its prompt that are news; the last message always is."""
    seen: set[int] = set()
    recent: deque[str] = deque(maxlen=3)
    changes = []
    for turn in turns:
        prompt = turn["prompt"]
        fresh = [i for i in prompt[:-1] if i not in seen and not (seen and _is_memory(messages[i], recent))]
        fresh += prompt[-1:]
        seen.update(prompt)
        recent.append("\n".join(text_of(messages[i]) for i in fresh))
        changes.append(fresh)
    return changes


def _is_memory(message: Mapping[str, Any], recent: deque[str]) -> bool:
    """Whether a message repeats an earlier response or observation."""
    if message.get("role") == "assistant":
        return True
    text = text_of(message)
    heading, _, rest = text.partition("\n")
    body = (rest if heading.rstrip().endswith(":") else text).strip()
    return any(body in earlier for earlier in recent)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the message's text without its images."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))
