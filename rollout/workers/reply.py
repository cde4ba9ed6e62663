"""An environment's reply to `reset` or `step`, the check that it keeps the environment contract, and its digest."""

from __future__ import annotations

import hashlib
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.base import Observation, StepInfo
from envs.errors import EnvironmentFault


@dataclass(frozen=True)
class EnvReply:
    """What an environment shows after `reset` (info is None) or `step`."""

    observation: Observation
    messages: Sequence[Mapping[str, Any]]
    """The observation in the form in which the environment puts it into the conversation."""
    instruction_prompt: str
    answer_format: str
    default_action: str
    deterministic: bool
    tools: Sequence[Mapping[str, Any]] = ()
    max_steps: int = 0
    """Steps after which the environment truncates the episode; 0 for no limit."""
    done: bool = False
    info: StepInfo | None = None
    seconds: float = 0.0
    """Time inside the environment."""
    was_cut: bool = False
    """Whether text or pictures were left out because the observation exceeded its limits."""


def check_reply(reply: EnvReply) -> None:
    """Check that an environment kept its contract.

    Raises:
        EnvironmentFault: the observation, the messages or the info cannot be used; names the field and its value.
    """
    observation = reply.observation
    text = observation.get("text") if isinstance(observation, Mapping) else None
    if not isinstance(text, Mapping):
        raise EnvironmentFault(f"observation['text'] must hold two strings, got {reprlib.repr(text)}")
    for part in ("long_term_context", "short_term_context"):
        _check_text(f"observation['text']['{part}']", text.get(part))
    _check_text("observation['obs_str']", observation.get("obs_str"))
    pictures = observation.get("multi_modal_data") or {}
    if not isinstance(pictures, Mapping) or not all(
        isinstance(images, list | tuple) and all(hasattr(image, "tobytes") for image in images)
        for images in pictures.values()
    ):
        raise EnvironmentFault(f"multi_modal_data must map names to lists of pictures, got {reprlib.repr(pictures)}")
    for name in ("instruction_prompt", "answer_format", "default_action"):
        _check_text(name, getattr(reply, name))
    if not reply.messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in reply.messages):
        raise EnvironmentFault(f"messages must be mappings with a role, got {reprlib.repr(reply.messages)}")
    _check_texts("messages", reply.messages)
    if reply.info is not None:
        check_info(reply.info, reply.done)


def check_info(info: Any, done: bool) -> None:
    """Check what `step` returned beside the observation.

    Raises:
        EnvironmentFault: a value is missing, of the wrong type or not finite, or `done` contradicts `info`.
    """
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a mapping, got {reprlib.repr(info)}")
    for name, kind in (("terminated", bool), ("truncated", bool), ("valid_action", bool), ("executed_action", str)):
        if not isinstance(info.get(name), kind):
            raise EnvironmentFault(f"info['{name}'] must be {kind.__name__}, got {reprlib.repr(info.get(name))}")
    _check_text("info['executed_action']", info["executed_action"])
    for name in ("reward", "progression"):
        if not _is_finite(info.get(name)):
            raise EnvironmentFault(f"info['{name}'] must be a finite number, got {reprlib.repr(info.get(name))}")
    if done is not (info["terminated"] or info["truncated"]):
        raise EnvironmentFault(
            f"done is {done!r} but terminated is {info['terminated']} and truncated {info['truncated']}"
        )
    if info.get("action") is not None and not isinstance(info["action"], str):
        raise EnvironmentFault(f"info['action'] must be a string or None, got {reprlib.repr(info['action'])}")
    span = info.get("action_span")
    if span is not None and not (isinstance(span, Sequence) and [type(edge) for edge in span] == [int, int]):
        raise EnvironmentFault(f"info['action_span'] must be two integers or None, got {reprlib.repr(span)}")
    metrics = info.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(isinstance(k, str) and _is_finite(v) for k, v in metrics.items()):
        raise EnvironmentFault(f"info['metrics'] must map names to finite numbers, got {reprlib.repr(metrics)}")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
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


def digest(reply: EnvReply) -> str:
    """Hash of what the agent sees and is paid; a replay with other digests played another episode."""
    hasher = hashlib.blake2b(digest_size=16)
    text = reply.observation["text"]
    parts = [text["long_term_context"], text["short_term_context"], reply.observation["obs_str"], str(reply.done)]
    if reply.info is not None:
        parts.append(repr(float(reply.info["reward"])))
    for part in parts:
        hasher.update(part.encode("utf-8", "surrogatepass") + b"\0")
    for images in (reply.observation.get("multi_modal_data") or {}).values():
        for image in images:
            hasher.update(image.tobytes())
    return hasher.hexdigest()
