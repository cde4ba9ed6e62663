"""Makes arguments from a tool's schema, to try the tool once before training."""

from collections.abc import Mapping
from typing import Any

from envs.tools.schema import Part, root_of

_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "name@example.com",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_TEXT = "text"
MAX_DEPTH = 8
"""Levels of nested values; a schema may refer to itself."""


def example_arguments(parameters: Mapping[str, Any]) -> Any:
    """Return the required arguments of a tool, from `examples`, `default`, `const`, `enum` or the type of each."""
    return _example(root_of(parameters, "the parameters"), MAX_DEPTH)


def _example(part: Part, depth: int) -> Any:
    parts = [found for found in _together(part, depth) if isinstance(found.schema, Mapping)]
    stated = {key: value for found in reversed(parts) for key, value in found.schema.items()}
    for key in ("examples", "enum"):
        if isinstance(stated.get(key), list) and stated[key]:
            return stated[key][0]
    for key in ("default", "const"):
        if key in stated:
            return stated[key]
    kind = stated.get("type", "object" if "properties" in stated else "string")
    kind = kind if isinstance(kind, str) else next((name for name in kind if name != "null"), "null")
    match kind:
        case "object":
            described = {name: found.at(inner) for found in parts for name, inner in found.get("properties").items()}
            required = dict.fromkeys(name for found in parts for name in found.schema.get("required", ()))
            return {name: _example(described[name], depth - 1) if name in described else _TEXT for name in required}
        case "array":
            items = stated.get("items", stated.get("prefixItems", {}))
            listed = items if isinstance(items, list) else [items] * max(1, stated.get("minItems", 1))
            return [_example(part.at(item), depth - 1) for item in listed] if depth else []
        case "integer" | "number":
            return _number(stated)
        case "boolean":
            return True
        case "null":
            return None
    text = _FORMATS.get(stated.get("format", ""), _TEXT)
    return text.ljust(stated.get("minLength", 0), "x")[: stated.get("maxLength")]


def _together(part: Part, depth: int) -> list[Part]:
    """Return the part and what describes the same value: `$ref`, all of `allOf`, the first of other alternatives."""
    if not depth or not isinstance(part.schema, Mapping):
        return [part]
    chosen = [inner for key in ("anyOf", "oneOf") for inner in part.schema.get(key, ())[:1]]
    inner = [*part.alternatives(("allOf",)), *map(part.at, chosen)]
    return [part, *(found for option in inner for found in _together(option, depth - 1))]


def _number(stated: Mapping[str, Any]) -> Any:
    step = stated.get("multipleOf", 1)
    low, high = stated.get("minimum"), stated.get("maximum")
    if isinstance(above := stated.get("exclusiveMinimum"), int | float) and not isinstance(above, bool):
        low = above + step
    value = step if low is None else -(-low // step) * step
    return min(value, high) if high is not None else value
