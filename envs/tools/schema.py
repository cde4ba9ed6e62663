"""JSON schemas of tools: inferred from signature and docstring, and used to check the arguments of calls.

The chat template shows the schema in OpenAI's form. Arguments that it does not name are refused.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from envs.errors import ToolError
from envs.tools.calls import decode_whole, short
from envs.tools.checking import first_error, make_validator

Schema = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def infer_schema(function: Callable[..., Any], name: str) -> Schema:
    """The schema of a function or method with type hints and a Google-style docstring.

    Raises:
        ToolError: it has no docstring, an argument without type hint or without a line under `Args:`, a type without
            JSON form, `*args` or `**kwargs`, or a positional-only argument.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    parameters = [p for key, p in inspect.signature(function).parameters.items() if key not in ("self", "cls")]
    for parameter in parameters:
        if parameter.kind in _VARIADIC:
            raise ToolError(f"{_place(function)}: {parameter} cannot be put into a schema; name every argument")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ToolError(f"{_place(function)}: {parameter.name} cannot be given by name; remove the `/`")
    if not getattr(function, "__doc__", None):  # inspect.getdoc would inherit one
        raise ToolError(f"{_place(function)}: no docstring; say what it does and describe its arguments under Args:")
    try:
        inferred = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
        raise ToolError(f"{_place(function)}: {error}") from error
    # OpenAI's form has no key for the return value.
    return {"type": "function", "function": {k: v for k, v in {**inferred, "name": name}.items() if k != "return"}}


def check_schema(schema: Mapping[str, Any], where: str) -> Schema:
    """Check a schema and complete it to OpenAI's form.

    Raises:
        ToolError: it does not have OpenAI's form, or its parameters are not a JSON schema of an object.
    """
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError(f"{where}: a schema is a mapping with name, description and parameters, got {short(schema)}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolError(f"{where}: a tool's name has letters, digits, _, - and ., at most 64; got {short(name)}")
    if not isinstance(description, str) or not description.strip():
        raise ToolError(f"{where}: the tool {name} needs a description for the model")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ToolError(f"{where}: the parameters of {name} must be a JSON schema of type object")
    make_validator(parameters, f"{where}: the parameters of {name}")
    return {"type": "function", "function": {**copy.deepcopy(dict(function)), "parameters": dict(parameters)}}


class ArgumentCheck:
    """Checks the arguments of calls against one tool's schema."""

    def __init__(self, schema: Schema) -> None:
        self.name: str = schema["function"]["name"]
        self._parameters = _strict(schema["function"]["parameters"])
        self._validator = make_validator(self._parameters, f"the parameters of {self.name}")

    def __call__(self, arguments: Mapping[str, Any]) -> str | None:
        """The error in the arguments, or None."""
        try:
            error = first_error(self._validator, arguments)
        except TimeoutError:
            return f"{self.name}: checking these arguments takes too long"
        except RecursionError:
            return f"{self.name}: these arguments are nested too deep"
        if error is None:
            return None
        where = ".".join(map(str, error.absolute_path))
        return f"{self.name}: {where + ': ' if where else ''}{_readable(error.message)}"

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Arguments from markup, which are text, converted to the schema's types where possible."""
        return convert_texts(arguments, self._parameters)


def convert_texts(arguments: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are text, converted to the types of a tool's `parameters` where possible."""
    properties = parameters.get("properties", {})
    return {key: _converted(value, properties.get(key, {})) for key, value in arguments.items()}


def _converted(text: str, schema: Mapping[str, Any]) -> Any:
    options = schema.get("anyOf", [schema])
    kinds = {kind for option in options for kind in _as_list(option.get("type", []))}
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    value, error = decode_whole(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text) if error else value


def _strict(schema: Any) -> Any:
    """The schema with `nullable` in JSON Schema's form, and without additional properties in objects."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    strict = {key: _strict_part(key, value) for key, value in schema.items()}
    if strict.get("type") == "object" and isinstance(strict.get("properties"), Mapping):
        strict.setdefault("additionalProperties", False)
    if strict.pop("nullable", False) is True:
        return {"anyOf": [strict, {"type": "null"}]}
    return strict


def _strict_part(key: str, value: Any) -> Any:
    if key in ("enum", "const", "default"):
        return value
    if key in ("properties", "patternProperties", "$defs") and isinstance(value, Mapping):
        return {name: _strict(part) for name, part in value.items()}
    return _strict(value)


def _readable(message: str) -> str:
    return message.encode("utf-8", "backslashreplace").decode() if len(message) <= 300 else message[:297] + "..."


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _place(function: Callable[..., Any]) -> str:
    return f"the tool {getattr(function, '__qualname__', function)} of {getattr(function, '__module__', '?')}"
