"""Cuts observations that are too large: text in the middle, with a note; of too many images the first are kept."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from envs.base import Observation
from rollout.spec import ObservationLimits


def cut_observation(observation: Observation, limits: ObservationLimits) -> Observation:
    """The same object if it is within the limits, otherwise a cut copy.

    The two parts of `text` share one limit. `obs_str` repeats them and has its own limit.
    """
    text, multi_modal = observation["text"], observation.get("multi_modal_data") or {}
    lengths = [len(text["long_term_context"]), len(text["short_term_context"])]
    missing = sum(map(len, multi_modal.values())) - limits.images
    if sum(lengths) <= limits.chars >= len(observation["obs_str"]) and missing <= 0:
        return observation
    note = images_note(missing)
    long, short = shares(lengths, limits.chars)
    within = {
        **observation,
        "obs_str": cut_text(observation["obs_str"], limits.chars) + note,
        "text": {
            **text,
            "long_term_context": cut_text(text["long_term_context"], long) + note,
            "short_term_context": cut_text(text["short_term_context"], short),
        },
    }
    if missing > 0:
        room = iter(range(limits.images))
        kept = {key: [image for image, _ in zip(images, room, strict=False)] for key, images in multi_modal.items()}
        within["multi_modal_data"] = kept
    return cast(Observation, within)


def cut_messages(messages: Sequence[Mapping[str, Any]], limits: ObservationLimits) -> Sequence[Mapping[str, Any]]:
    """The messages of one observation: the same object if together they are within the limits, else a cut copy."""
    texts = [part for message in messages for part in _parts(message) if _is_text(part)]
    lengths = [len(part["text"]) for part in texts]
    images = sum(part.get("type") == "image" for message in messages for part in _parts(message))
    if sum(lengths) <= limits.chars and images <= limits.images:
        return messages
    room, left = iter(shares(lengths, limits.chars)), iter(range(limits.images))
    cut = [_rebuilt(message, room, left) for message in messages]
    if images > limits.images:
        cut[-1] = _with_note(cut[-1], images_note(images - limits.images))
    return cut


def cut_text(text: str, chars: int) -> str:
    """The text, or its beginning and its end, `chars` characters in all, with a note between them."""
    if len(text) <= chars:
        return text
    tail = chars // 2
    note = f"\n[... {len(text) - chars:,} characters left out ...]\n"
    return text[: chars - tail] + note + text[len(text) - tail :]


def images_note(missing: int) -> str:
    """A note about the images that were left out; empty if none were."""
    return f"\n[{missing:,} more pictures left out]" if missing > 0 else ""


def shares(lengths: Sequence[int], total: int) -> list[int]:
    """How much of each length to keep, at most `total` in all: short ones whole, long ones in equal parts."""
    kept = list(lengths)
    left = total
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        kept[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= kept[index]
    return kept


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content or () if isinstance(part, Mapping)]


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _rebuilt(message: Mapping[str, Any], room: Iterable[int], left: Iterable[int]) -> dict[str, Any]:
    """The message with its texts cut to the next shares and with as many images as `left` still yields."""
    room, left = iter(room), iter(left)
    parts = []
    for part in _parts(message):
        if _is_text(part):
            parts.append({**part, "text": cut_text(part["text"], next(room))})
        elif part.get("type") != "image" or next(left, None) is not None:
            parts.append(dict(part))
    return {**message, "content": parts[0]["text"] if isinstance(message.get("content"), str) else parts}


def _with_note(message: dict[str, Any], note: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + note}
    return {**message, "content": [*content, {"type": "text", "text": note}]}
