"""Reads JSON out of a model's response; what cannot be read becomes words for an error message."""

import json
import math
from collections import Counter
from typing import Any


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number:.20} is too large")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members; equal keys are refused."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(twice)} appears twice in one object")
    return members


# Raw line breaks inside strings are accepted: they are unambiguous and common in code.
_decoder = json.JSONDecoder(
    strict=False,
    parse_float=_finite,
    parse_constant=_no_constant,
    object_pairs_hook=_distinct,
)


def decode(text: str, start: int = 0) -> tuple[Any, int, str]:
    """Read one JSON value that begins at `start` or after white space: (value, where it ends, error
    or "")."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _decoder.raw_decode(text, start)
        return value, end, ""
    except json.JSONDecodeError as error:
        return None, start, f"the call is not JSON: {error.msg} at character {error.pos - start}"
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        return None, start, f"the call is not JSON that can be read: {reason}"


def decode_whole(text: str) -> tuple[Any, str]:
    """Read a text that is one JSON value: (value, error or "")."""
    value, end, error = decode(text)
    return value, error or ("something follows it" if text[end:].strip() else "")


def find_flaw(value: Any) -> str:
    """Return why a decoded value cannot be written as JSON in UTF-8, or "" if it can."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    except RecursionError:
        return "is nested too deep"
    return ""


def short(value: Any) -> str:
    """Return a value for an error message: at most 60 characters, safe to encode."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = type(value).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."
