"""Checks that a reply to `reset` or `step` keeps the environment contract, and cuts observations that are too large.

Text is cut in the middle, with a note; of too many images the first are kept.
"""

import difflib
import json
import math
import numbers
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from envs.base import Observation
from envs.errors import ConfigError, EnvironmentFault
from rollout.spec import ObservationLimits
from rollout.turn import EnvReply

HEADER = struct.Struct("!Q")
"""Precedes every pickle on a socket: its number of bytes. `worker.py` and `hosts.py` use it, and `players/wire.py`."""
INFO_KEYS = ("reward", "terminated", "truncated", "valid_action", "executed_action", "progression")
"""Keys that `info` must have; see `envs.base.StepInfo`."""


def check_reply(reply: EnvReply) -> None:
    """Raise EnvironmentFault, which names the field and its value, if an environment broke its contract."""
    check_observation(reply.observation)
    for name in ("instruction_prompt", "answer_format", "default_action"):
        _check_text(name, getattr(reply, name))
    enough = reply.messages or (reply.whole_prompts and reply.done)
    if not enough or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in reply.messages):
        raise EnvironmentFault(f"messages must be mappings with a role, got {reprlib.repr(reply.messages)}")
    _check_texts("messages", reply.messages)
    for message in reply.messages:
        content = message.get("content")
        is_list = isinstance(content, list | tuple) and all(map(_is_part, content))
        if not (isinstance(content, str) or is_list or (content is None and message.get("tool_calls"))):
            raise EnvironmentFault(
                "a message's content must be a text or a list of parts such as {'type': 'text', 'text': 'a'} and "
                f"{{'type': 'image', 'image': image}}, got {reprlib.repr(content)}"
            )
    if reply.info is None:  # tools do not change within an episode
        try:
            json.dumps([dict(tool) for tool in reply.tools])
        except (TypeError, ValueError) as error:
            said = f"tools must be a list of JSON schemas, got {reprlib.repr(reply.tools)}"
            raise EnvironmentFault(f"{said} ({error})") from error
    if not isinstance(reply.facts, list | tuple) or not all(isinstance(f, str) and f.strip() for f in reply.facts):
        raise EnvironmentFault(f"facts() must return a list of texts, none blank, got {reprlib.repr(reply.facts)}")
    if reply.info is not None:
        check_info(reply.info, reply.done)


def check_history(reply: EnvReply, history: str) -> None:
    """Raise ConfigError if the way in which prompts are built does not suit the environment."""
    if reply.whole_prompts and history == "full":
        raise ConfigError(
            "history: full appends to one conversation, but here every observation is a whole prompt, which need not "
            "begin with the one before it; leave history out of the YAML (with preset: glm52, give history: window)"
        )


def check_observation(observation: Any) -> None:
    """Raise EnvironmentFault for an observation that lacks a key, or has a value of the wrong type."""
    if not isinstance(observation, Mapping):
        hint = "; return the observation alone" if isinstance(observation, tuple) else ""
        raise EnvironmentFault(
            f"the observation must be a mapping such as envs.base.make_observation(text), got "
            f"{type(observation).__name__} {reprlib.repr(observation)}{hint}"
        )
    _check_keys("observation", observation, ("obs_str", "text"), "; envs.base.make_observation(text) builds one")
    text = observation["text"]
    if not isinstance(text, Mapping):
        raise EnvironmentFault(
            "observation['text'] must hold two strings, long_term_context and short_term_context, got "
            f"{reprlib.repr(text)}"
        )
    for part in ("long_term_context", "short_term_context"):
        _check_text(f"observation['text']['{part}']", text.get(part))
    _check_text("observation['obs_str']", observation["obs_str"])
    multi_modal = observation.get("multi_modal_data") or {}
    if not isinstance(multi_modal, Mapping) or not all(isinstance(i, list | tuple) for i in multi_modal.values()):
        raise EnvironmentFault(f"multi_modal_data must map names to lists of pictures, got {reprlib.repr(multi_modal)}")


def read_step(answer: Any) -> tuple[Any, bool, Any]:
    """Return observation, done and info of a `step`, with numpy's scalars as Python's bools and numbers.

    Raises:
        EnvironmentFault: it is not three values, or `done` is not a bool.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        came = f"{len(answer)} values" if isinstance(answer, tuple | list) else reprlib.repr(answer)
        hint = ""
        if isinstance(answer, tuple | list) and len(answer) in (4, 5):
            hint = "; unlike in Gymnasium, reward, terminated and truncated are keys of info"
        raise EnvironmentFault(f"step must return (observation, done, info), got {came}{hint}")
    observation, done, info = answer
    done = _plain(done)
    if not isinstance(done, bool | int) or done not in (0, 1):
        raise EnvironmentFault(f"done must be bool, got {reprlib.repr(done)}")
    return observation, bool(done), _plain(info, 2) if isinstance(info, Mapping) else info


def _plain(value: Any, inside: int = 0) -> Any:
    """Python's bool, number or string for a scalar of numpy or torch; `inside` levels of mappings and lists too.

    Of text, only the characters: an environment's own class cannot be unpickled in another process.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if inside and isinstance(value, Mapping):
        return {_plain(name): _plain(item, inside - 1) for name, item in value.items()}
    if inside and isinstance(value, list | tuple):
        return tuple(_plain(item, inside - 1) for item in value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def check_info(info: Any, done: bool) -> None:
    """Raise EnvironmentFault for a value in `info` that is missing, wrong, not finite, or contradicts `done`."""
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a mapping, got {reprlib.repr(info)}")
    _check_keys("info", info, INFO_KEYS)
    for name, kind in (("terminated", bool), ("truncated", bool), ("valid_action", bool), ("executed_action", str)):
        if not isinstance(info.get(name), kind):
            raise EnvironmentFault(f"info['{name}'] must be {kind.__name__}, got {reprlib.repr(info.get(name))}")
    _check_text("info['executed_action']", info["executed_action"])
    for name in ("reward", "progression"):
        if not _is_finite(info.get(name)):
            raise EnvironmentFault(f"info['{name}'] must be a finite number, got {reprlib.repr(info.get(name))}")
    if not -1e-6 <= info["progression"] <= 1 + 1e-6:  # sums of shares are rounded
        raise EnvironmentFault(f"info['progression'] must be from 0 (start) to 1 (won), got {info['progression']:g}")
    if done is not (info["terminated"] or info["truncated"]):
        raise EnvironmentFault(
            f"done is {done!r} but terminated is {info['terminated']} and truncated {info['truncated']}"
        )
    if info.get("action") is not None and not isinstance(info["action"], str):
        raise EnvironmentFault(f"info['action'] must be a string or None, got {reprlib.repr(info['action'])}")
    span = info.get("action_span")
    if span is not None and not (isinstance(span, Sequence) and [type(edge) for edge in span] == [int, int]):
        raise EnvironmentFault(f"info['action_span'] must be two integers or None, got {reprlib.repr(span)}")
    if not isinstance(info.get("moves", True), bool):
        raise EnvironmentFault(f"info['moves'] must be bool, got {reprlib.repr(info['moves'])}")
    metrics = info.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(isinstance(k, str) and _is_finite(v) for k, v in metrics.items()):
        raise EnvironmentFault(f"info['metrics'] must map names to finite numbers, got {reprlib.repr(metrics)}")


def _check_keys(name: str, mapping: Mapping[Any, Any], needed: Sequence[str], advice: str = "") -> None:
    missing = [key for key in needed if key not in mapping]
    if missing:
        others = [str(key) for key in mapping if key not in needed]
        near = difflib.get_close_matches(missing[0], others, n=1)
        hint = f"; rename '{near[0]}'" if near else f"; its keys are {', '.join(map(str, mapping)) or 'none'}"
        raise EnvironmentFault(f"{name} has no key '{missing[0]}'{hint}{advice}")


def _is_finite(value: Any) -> bool:
    try:
        # The check against the abstract class takes ten times as long as that of the type.
        return (type(value) is float or isinstance(value, numbers.Real)) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def _check_text(name: str, value: Any) -> None:
    """A tokenizer cannot encode half of a surrogate pair, so such text is refused here."""
    if not isinstance(value, str):
        raise EnvironmentFault(f"{name} must be a string, got {reprlib.repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(f"{name} holds half of a surrogate pair: {reprlib.repr(value)}") from error


def _check_texts(name: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, Mapping):
        _check_texts(name, list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(name, item)


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
    texts = [part for message in messages for part in _content_parts(message) if _is_text(part)]
    lengths = [len(part["text"]) for part in texts]
    images = sum(part.get("type") == "image" for message in messages for part in _content_parts(message))
    if sum(lengths) <= limits.chars and images <= limits.images:
        return messages
    room, left = iter(shares(lengths, limits.chars)), iter(range(limits.images))
    cut = [_rebuilt(message, room, left) for message in messages]
    if images > limits.images:
        cut[-1] = with_text(cut[-1], images_note(images - limits.images))
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


def _content_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content or () if isinstance(part, Mapping)]


def _is_part(part: Any) -> bool:
    is_image = isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is not None
    return is_image or (isinstance(part, Mapping) and part.get("type") == "text" and _is_text(part))


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _rebuilt(message: Mapping[str, Any], room: Iterator[int], left: Iterator[int]) -> dict[str, Any]:
    """The message with its texts cut to the next shares and with as many images as `left` still yields."""
    parts = []
    for part in _content_parts(message):
        if _is_text(part):
            parts.append({**part, "text": cut_text(part["text"], next(room))})
        elif part.get("type") != "image" or next(left, None) is not None:
            parts.append(dict(part))
    return {**message, "content": parts[0]["text"] if isinstance(message.get("content"), str) else parts}


def with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the message with `text` appended to its content."""
    content = message["content"]
    added = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": added}
