"""Makes arguments from a tool's schema, to try the tool once before training."""

from collections.abc import Mapping
from typing import Any

from envs.tools.schema import Parameters

_TEXT = "text"
MAX_DEPTH = 8
"""Levels of nested values; a schema may refer to itself."""


def example_arguments(schema: Mapping[str, Any]) -> Any:
    """Return the required arguments of a tool, from `examples`, `default`, `const`, `enum` or the type of each."""
    return _example(Parameters(schema), schema, MAX_DEPTH)


def _example(parameters: Parameters, schema: Any, depth: int) -> Any:
    stated = _stated(parameters, schema, depth)
    for key in ("examples", "enum"):
        if isinstance(stated.get(key), list) and stated[key]:
            return stated[key][0]
    for key in ("default", "const"):
        if key in stated:
            return stated[key]
    kind = stated.get("type", "object" if stated.get("properties") else "string")
    match kind if isinstance(kind, str) else kind[0]:
        case "object":
            described = stated.get("properties", {})
            names = stated.get("required", ())
            return {name: _example(parameters, described.get(name, {}), depth - 1) for name in names}
        case "array":
            items = stated.get("items", {})
            return [_example(parameters, items, depth - 1)] if depth and stated.get("minItems") else []
        case "integer" | "number":
            return stated.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
    return _TEXT


def _stated(parameters: Parameters, schema: Any, depth: int) -> dict[str, Any]:
    """Return the keywords that describe a value: its own, those of `$ref` and `allOf`, and of a first alternative."""
    if not depth or not isinstance(schema, Mapping):
        return {}
    others = [*schema.get("allOf", ()), *schema.get("anyOf", ())[:1], *schema.get("oneOf", ())[:1]]
    if "$ref" in schema:
        others.append(parameters.target(schema["$ref"]))
    stated: dict[str, Any] = {}
    for part in (*(_stated(parameters, other, depth - 1) for other in others), schema):
        properties = {**stated.get("properties", {}), **part.get("properties", {})}
        required = [*stated.get("required", ()), *part.get("required", ())]
        stated |= {**part, "properties": properties, "required": required}
    return stated
