"""Makes arguments from a tool's schema, to try the tool once before training."""

from collections.abc import Mapping
from typing import Any

from envs.tools.schema import Part, root_of

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
    kind = kind if isinstance(kind, str) else kind[0]
    match kind:
        case "object":
            described = {name: found.at(inner) for found in parts for name, inner in found.get("properties").items()}
            required = dict.fromkeys(name for found in parts for name in found.schema.get("required", ()))
            return {name: _example(described[name], depth - 1) if name in described else _TEXT for name in required}
        case "array":
            items = stated.get("items", {})
            return [_example(part.at(items), depth - 1)] if depth and stated.get("minItems") else []
        case "integer" | "number":
            return stated.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
    return _TEXT


def _together(part: Part, depth: int) -> list[Part]:
    """Return the part and what describes the same value: `$ref`, all of `allOf`, the first of other alternatives."""
    if not depth or not isinstance(part.schema, Mapping):
        return [part]
    chosen = [inner for key in ("anyOf", "oneOf") for inner in part.schema.get(key, ())[:1]]
    inner = [*part.alternatives(("allOf",)), *map(part.at, chosen)]
    return [part, *(found for option in inner for found in _together(option, depth - 1))]
