"""JSON schemas of tools: inferred from functions, completed to OpenAI's form, and checked against calls.

A schema is refused when its tool is listed if it refers to something outside itself, or to itself without end. What
remains may still be slow on some arguments, so every check has a deadline; patterns run in the package `regex`, which
can be interrupted. Arguments that a schema does not name are refused.
"""

import copy
import inspect
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from envs.errors import ToolError
from envs.loading import import_extra
from envs.tools.calls import decode_whole, find_flaw, short

Schema = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""

CHECK_S = 1.0
"""Seconds that one check of arguments may take."""
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose value is not a schema."""
_deadline: ContextVar[float] = ContextVar("deadline")


def infer_schema(function: Callable[..., Any], name: str) -> Schema:
    """Infer the schema of a function or method from its type hints and its Google-style docstring.

    Raises:
        ToolError: it has no docstring, an argument without type hint or without a line under `Args:`, a type without
            JSON form, `*args` or `**kwargs`, or a positional-only argument.
    """
    from transformers.utils import chat_template_utils as reading

    where = f"the tool {getattr(function, '__qualname__', function)} of {getattr(function, '__module__', '?')}"
    parameters = [p for key, p in inspect.signature(function).parameters.items() if key not in ("self", "cls")]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(f"{where}: {parameter} cannot be put into a schema; name every argument")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolError(f"{where}: {parameter.name} cannot be given by name; remove the `/`")
    if not getattr(function, "__doc__", None):  # inspect.getdoc would inherit one
        raise ToolError(f"{where}: no docstring; say what it does and describe its arguments under Args:")
    try:
        inferred = reading.get_json_schema(function)["function"]
    except (reading.DocstringParsingException, reading.TypeHintParsingException, NameError, ValueError) as error:
        raise ToolError(f"{where}: {error}") from error
    # OpenAI's form has no key for the return value.
    return {"type": "function", "function": {k: v for k, v in {**inferred, "name": name}.items() if k != "return"}}


def check_schema(schema: Mapping[str, Any], where: str) -> Schema:
    """Check a schema and complete it to OpenAI's form; raises ToolError if that cannot be."""
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError(f"{where}: a schema is a mapping with name, description and parameters, got {short(schema)}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ToolError(f"{where}: a tool's name has letters, digits, _, - and ., at most 64; got {short(name)}")
    if not isinstance(description, str) or not description.strip():
        raise ToolError(f"{where}: the tool {name} needs a description for the model")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ToolError(f"{where}: the parameters of {name} must be a JSON schema of type object")
    _make_validator(parameters, f"{where}: the parameters of {name}")
    _make_validator(_strict(parameters), f"{where}: the parameters of {name}")  # calls are checked with these
    return {"type": "function", "function": {**copy.deepcopy(dict(function)), "parameters": dict(parameters)}}


class ArgumentCheck:
    """Checks the arguments of calls against one tool's schema."""

    def __init__(self, schema: Schema) -> None:
        self.name: str = schema["function"]["name"]
        self._parameters = _strict(schema["function"]["parameters"])
        self._validator = _make_validator(self._parameters, f"the parameters of {self.name}")

    def __call__(self, arguments: Mapping[str, Any]) -> str | None:
        """Returns the most telling error in the arguments, or None."""
        from jsonschema.exceptions import best_match

        token = _deadline.set(time.monotonic() + CHECK_S)
        try:
            error = best_match(self._validator.iter_errors(dict(arguments)))
        except TimeoutError:
            return f"{self.name}: checking these arguments takes too long"
        except RecursionError:
            return f"{self.name}: these arguments are nested too deep"
        finally:
            _deadline.reset(token)
        if error is None:
            return None
        where, message = ".".join(map(str, error.absolute_path)), error.message
        message = message.encode("utf-8", "backslashreplace").decode() if len(message) <= 300 else message[:297] + "..."
        return f"{self.name}: {where + ': ' if where else ''}{message}"

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Convert arguments from markup, which are text, to the schema's types where possible."""
        return convert_texts(arguments, self._parameters)


def convert_texts(arguments: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments that are text to the types of a tool's `parameters` where possible."""
    properties = parameters.get("properties", {})
    return {key: _converted(value, alternatives(properties.get(key), parameters)) for key, value in arguments.items()}


def alternatives(schema: Any, root: Mapping[str, Any], depth: int = 5) -> list[Mapping[str, Any]]:
    """Return the schemas that a value may have, through references of `root`; empty for `true`, which allows any."""
    if not isinstance(schema, Mapping):
        return []
    inner = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    inner += [_target(schema["$ref"], root, "the parameters")] if "$ref" in schema else []
    return [found for part in inner if depth for found in alternatives(part, root, depth - 1)] or [schema]


def _converted(text: str, options: list[Mapping[str, Any]]) -> Any:
    allowed = lambda kind: any(kind in option.get("type", ()) for option in options)
    if allowed("string") and not (text == "null" and allowed("null")):
        return text
    value, error = decode_whole(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text) if error or find_flaw(value) else value


def _strict(schema: Any) -> Any:
    """Return the schema with `nullable` in JSON Schema's form, and without additional properties in objects."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            strict[key] = {name: _strict(part) for name, part in value.items()}
        else:
            strict[key] = value if key in _DATA else _strict(value)
    if strict.get("type") == "object" and isinstance(strict.get("properties"), Mapping):
        strict.setdefault("additionalProperties", False)
    if strict.pop("nullable", False) is True:
        return {"anyOf": [strict, {"type": "null"}]}
    return strict


# --- The validator -------------------------------------------------------------------------------------------------


def _make_validator(schema: Mapping[str, Any], where: str) -> Any:
    """jsonschema's validator for a schema, whose `iter_errors` raises TimeoutError after the deadline."""
    jsonschema = import_extra("jsonschema", "a tool", "tools")
    import_extra("regex", "a tool", "tools")  # here, so that an error comes before the first call
    base = jsonschema.Draft202012Validator
    try:
        base.check_schema(schema)
        _check_parts(schema, where)
    except jsonschema.SchemaError as error:
        raise ToolError(f"{where} are not a JSON schema: {error.message[:300]}") from error
    except RecursionError as error:
        raise ToolError(f"{where} are nested too deep") from error
    keywords = {name: _limited(check) for name, check in base.VALIDATORS.items()}
    keywords |= {"pattern": _pattern, "patternProperties": _pattern_properties, "uniqueItems": _unique_items}
    keywords["additionalProperties"] = _without_patterns(keywords["additionalProperties"])
    # JSON Schema accepts 1.0 as an integer; a Python function that expects an int would get a float.
    types = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return jsonschema.validators.extend(base, keywords, type_checker=types)(schema)


def _check_parts(root: Mapping[str, Any], where: str) -> None:
    """Check the patterns and references of all parts of a schema."""
    import regex

    parts, checked = list(_parts(root)), set[int]()
    if any("$ref" in part for part in parts) and any("$id" in part for part in parts):
        raise ToolError(f"{where} have both $id and $ref; leave out $id")
    for keys in (("$dynamicRef",), ("unevaluatedProperties", "patternProperties")):
        if all(any(key in part for part in parts) for key in keys):
            raise ToolError(f"{where} use {' with '.join(keys)}, which is not supported")
    for part in parts:
        for pattern in [*filter(None, [part.get("pattern")]), *part.get("patternProperties", ())]:
            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ToolError(f"{where} have a pattern that cannot be read, {short(pattern)}: {error}") from error
        _check_loops(part, root, where, checked, ())


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all schemas inside a schema, and itself."""
    if isinstance(part, list):
        for item in part:
            yield from _parts(item)
    elif isinstance(part, Mapping):
        yield part
        for key, value in part.items():
            if key not in _DATA:
                yield from _parts(list(value.values()) if key in _NAMED else value)


def _check_loops(part: Any, root: Mapping[str, Any], where: str, checked: set[int], above: tuple[int, ...]) -> None:
    """Follow what is applied to the same value as `part`: references, alternatives and conditions."""
    if not isinstance(part, Mapping) or id(part) in checked:
        return
    if id(part) in above:
        raise ToolError(f"{where} refer to themselves without end ({short(part)})")
    follow = [part[key] for key in ("not", "if", "then", "else") if key in part]
    follow += [inner for key in ("allOf", "anyOf", "oneOf") for inner in part.get(key, ())]
    follow += part.get("dependentSchemas", {}).values()
    follow += [_target(part["$ref"], root, where)] if "$ref" in part else []
    for inner in follow:
        _check_loops(inner, root, where, checked, (*above, id(part)))
    checked.add(id(part))


def _target(reference: str, root: Mapping[str, Any], where: str) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        raise ToolError(f"{where} refer to {short(reference)}; only references such as #/$defs/NAME are supported")
    found: Any = root
    for key in urllib.parse.unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (LookupError, TypeError, ValueError) as error:
            raise ToolError(f"{where} refer to {short(reference)}, which is not in them") from error
    return found


Keyword = Callable[[Any, Any, Any, Any], Iterator[Any]]
"""jsonschema's check of one keyword: validator, the keyword's value, instance and schema to errors."""


def _limited(check: Callable[..., Any]) -> Keyword:
    """Return a keyword's check that ends at the deadline."""

    def limited(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _seconds_left()
        yield from check(validator, value, instance, schema) or ()

    return limited


def _seconds_left() -> float:
    left = _deadline.get(float("inf")) - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _found(pattern: str, text: str) -> bool:
    import regex

    return regex.search(pattern, text, timeout=min(_seconds_left(), CHECK_S)) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, Mapping):
        for pattern, inner in patterns.items():
            for key in (key for key in instance if _found(pattern, key)):
                yield from validator.descend(instance[key], inner, path=key, schema_path=pattern)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """In linear time; jsonschema compares each pair of items that cannot be sorted."""
    from jsonschema.exceptions import ValidationError

    if wanted and isinstance(instance, list) and len({json.dumps(i, sort_keys=True) for i in instance}) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _without_patterns(check: Keyword) -> Keyword:
    """Return the check of additional properties, which are those that match no pattern."""

    def additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties") or {}
        if patterns and isinstance(instance, Mapping):
            instance = {key: item for key, item in instance.items() if not any(_found(p, key) for p in patterns)}
        yield from check(validator, value, instance, {k: v for k, v in schema.items() if k != "patternProperties"})

    return additional
