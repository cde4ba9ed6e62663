"""What a tool may return, and what becomes of it: text, pictures, reward and metrics, all of bounded size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envs.errors import ToolError
from envs.pictures import is_picture, open_picture
from envs.tools.calls import short


@dataclass(frozen=True)
class ToolResult:
    """One result. `failed` marks an error that the model is shown in place of a result."""

    text: str = ""
    images: tuple[Any, ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True)
class ResultLimits:
    """Most characters of text, most pictures, and most pixels of a picture that one result may show."""

    chars: int = 8000
    images: int = 4
    pixels: int = 2048 * 2048


def failure(text: str, limits: ResultLimits) -> ToolResult:
    """An error as the model is shown it."""
    return _bounded(ToolResult(f"error: {text}", failed=True), limits)


def read_result(value: Any, limits: ResultLimits) -> ToolResult:
    """Bring whatever a tool returned into one form.

    A text is shown as it is; a mapping as JSON, save one with `text` and `image` or `images`; a picture or a list of
    pictures as pictures; `(response, reward)` and `(response, reward, metrics)` give the turn a reward and the logs
    numbers; None is an empty text, anything else JSON where it can be JSON.

    Raises:
        ToolError: a tuple of another length, a reward or metric that is no finite number, or a picture that cannot
            be read, is too large or one too many.
    """
    if not isinstance(value, tuple) or isinstance(value, ToolResult):
        return _bounded(_response(value), limits)
    if not 2 <= len(value) <= 3:
        forms = "response, (response, reward) or (response, reward, metrics)"
        raise ToolError(f"a tool returned {short(value)}, not {forms}")
    result = _response(value[0])
    metrics = value[2] if len(value) == 3 and value[2] is not None else {}
    if not isinstance(metrics, Mapping):
        raise ToolError(f"a tool's metrics must be a mapping of numbers, got {short(metrics)}")
    reward = 0.0 if value[1] is None else _number(value[1], "reward")
    numbers = {str(key): _number(number, f"metric {key}") for key, number in metrics.items()}
    return _bounded(replace(result, reward=result.reward + reward, metrics={**result.metrics, **numbers}), limits)


def _response(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    if is_picture(value):
        return ToolResult(images=(value,))
    if isinstance(value, list) and value and all(is_picture(item) for item in value):
        return ToolResult(images=tuple(value))
    if isinstance(value, Mapping) and set(value) <= {"text", "image", "images"} and set(value) != {"text"} and value:
        pictures = [value[key] for key in ("image", "images") if value.get(key) is not None]
        images = tuple(p for item in pictures for p in (item if isinstance(item, list | tuple) else [item]))
        return ToolResult(str(value.get("text") or ""), images)
    return ToolResult(_as_json(value))


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ToolError(f"a tool's {what} must be a number, got {short(value)}") from error
    if not math.isfinite(number):
        raise ToolError(f"a tool's {what} must be a finite number, got {number}")
    return number


def _bounded(result: ToolResult, limits: ResultLimits) -> ToolResult:
    if len(result.images) > limits.images:
        raise ToolError(f"the tool returned {len(result.images)} pictures; at most {limits.images} are shown")
    images = tuple(open_picture(image, limits.pixels) for image in result.images)
    return replace(result, text=clip(encodable(result.text), limits.chars), images=images)


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def clip(text: str, limit: int) -> str:
    """Keep the first and the last part of a text of more than `limit` characters, and say so in between."""
    if len(text) <= limit:
        return text
    half = max((limit - 60) // 2, 1)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
