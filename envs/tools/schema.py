"""JSON schemas of tools: inferred from functions, completed to OpenAI's form, and checked against
calls.

jsonschema checks a call by the rules of the schema's own draft. Names that the outermost object
does not describe are refused. A schema is refused when its tool is listed if it refers to something
outside itself, or to itself without end. What remains may still be slow on some arguments, so every
check has a deadline; patterns run in the package `regex`, which can be interrupted.
"""

import copy
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from envs.errors import ToolError
from envs.json_text import decode_whole, find_flaw, short
from envs.loading import import_extra

Schema = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""

CHECK_S = 1.0
"""Seconds that one check of arguments may take."""
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("not", "if", "then", "else")
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "dependencies"}
"""Keywords of an outermost object that itself says which other names it takes."""
_deadline: ContextVar[float] = ContextVar("deadline")


def infer_schema(function: Callable[..., Any], name: str) -> Schema:
    """Infer the schema of a function or method from its type hints and its Google-style docstring.

    Raises:
        ToolError: it has no docstring, an argument without type hint or without a line under
            `Args:`, a type without JSON form, `*args` or `**kwargs`, or a positional-only argument.
    """
    from transformers.utils import chat_template_utils as reading

    where = f"the tool {getattr(function, '__qualname__', function)} of {getattr(function, '__module__', '?')}"
    parameters = [
        p for key, p in inspect.signature(function).parameters.items() if key not in ("self", "cls")
    ]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(
                f"{where}: {parameter} cannot be put into a schema; name every argument"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolError(f"{where}: {parameter.name} cannot be given by name; remove the `/`")
    if not getattr(function, "__doc__", None):  # inspect.getdoc would inherit one
        raise ToolError(
            f"{where}: no docstring; say what it does and describe its arguments under Args:"
        )
    try:
        inferred = reading.get_json_schema(function)["function"]
    except (
        reading.DocstringParsingException,
        reading.TypeHintParsingException,
        NameError,
        ValueError,
    ) as error:
        raise ToolError(f"{where}: {error}") from error
    # OpenAI's form has no key for the return value.
    return {
        "type": "function",
        "function": {k: v for k, v in {**inferred, "name": name}.items() if k != "return"},
    }


def check_schema(schema: Mapping[str, Any], where: str) -> Schema:
    """Check a schema and complete it to OpenAI's form; raises ToolError if that cannot be."""
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError(
            f"{where}: a schema is a mapping with name, description and parameters, got "
            f"{short(schema)}"
        )
    name = function.get("name")
    description = function.get("description")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ToolError(
            f"{where}: a tool's name has letters, digits, _, - and ., at most 64; got {short(name)}"
        )
    if not isinstance(description, str) or not description.strip():
        raise ToolError(f"{where}: the tool {name} needs a description for the model")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ToolError(f"{where}: the parameters of {name} must be a JSON schema of type object")
    _make_validator(Parameters(parameters, f"{where}: the parameters of {name}"))
    return {
        "type": "function",
        "function": {**copy.deepcopy(dict(function)), "parameters": dict(parameters)},
    }


class ArgumentCheck:
    """Checks the arguments of calls against one tool's schema."""

    def __init__(self, schema: Schema) -> None:
        self.name: str = schema["function"]["name"]
        self._parameters = Parameters(
            schema["function"]["parameters"], f"the parameters of {self.name}"
        )
        self._validator = _make_validator(self._parameters)
        self._names = self._parameters.closed_names()

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
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            message = error.message.encode("utf-8", "backslashreplace").decode()
            message = message if len(message) <= 300 else message[:297] + "..."
            return f"{self.name}: {place}: {message}" if place else f"{self.name}: {message}"
        for name in arguments:
            if self._names is not None and name not in self._names:
                known = ", ".join(self._names) or "none"
                return f"{self.name}: {short(name)} is not an argument; the arguments are {known}"
        return None

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Convert arguments from markup, which are text, to the schema's types where possible."""
        return self._parameters.convert(arguments)


class Parameters:
    """A tool's parameters, read by the rules of the draft that `$schema` names; 2020-12 without
    it."""

    def __init__(self, schema: Mapping[str, Any], where: str = "the parameters") -> None:
        jsonschema = import_extra("jsonschema", "a tool", "tools")
        from referencing import Registry
        from referencing.jsonschema import specification_with

        self.schema = schema
        self.where = where
        for keyword in ("$schema", "$id"):
            value = schema.get(keyword, "")
            if not isinstance(value, str):
                raise ToolError(f"{where}: {keyword} must be text, got {short(value)}")
        self.draft = jsonschema.validators.validator_for(
            schema, default=jsonschema.Draft202012Validator
        )
        self.resource = specification_with(self.draft.META_SCHEMA["$schema"]).create_resource(
            schema
        )
        self._resolver = Registry().resolver_with_root(self.resource)

    def target(self, reference: Any) -> Any:
        """Return the schema that a `$ref` names; raises ToolError for an unknown one."""
        from referencing.exceptions import Unresolvable

        try:
            return self._resolver.lookup(reference).contents
        except (Unresolvable, AttributeError, TypeError, ValueError) as error:
            raise ToolError(
                f"{self.where} refer to {short(reference)}, which is not in them; "
                "only references such as #/$defs/NAME are supported"
            ) from error

    def same_value(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas that are applied to the same value: alternatives, references and
        conditions."""
        found = [inner for keyword in _ALTERNATIVES for inner in schema.get(keyword, ())]
        found += [schema[keyword] for keyword in _CONDITIONS if keyword in schema]
        found += schema.get("dependentSchemas", {}).values()
        if "$ref" in schema:
            found.append(self.target(schema["$ref"]))
        return found

    def reached(
        self, schema: Any, above: tuple[int, ...] = (), checked: set[int] | None = None
    ) -> Iterator[Any]:
        """Yield the schema and what is applied to the same value; raises ToolError if references
        lead back to it."""
        checked = set() if checked is None else checked
        if not isinstance(schema, Mapping) or id(schema) in checked:
            return
        if id(schema) in above:
            raise ToolError(f"{self.where} refer to themselves without end ({short(schema)})")
        yield schema
        for inner in self.same_value(schema):
            yield from self.reached(inner, (*above, id(schema)), checked)
        checked.add(id(schema))

    def properties(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the schemas that apply to each argument, through references, alternatives and
        conditions."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for outermost in self.reached(self.schema):
            for name, schema in outermost.get("properties", {}).items():
                found.setdefault(name, []).extend(self.reached(schema))
        return found

    def closed_names(self) -> list[str] | None:
        """Return the only names that arguments may have; None if there are no names, or others are
        allowed."""
        used = {keyword for schema in self.reached(self.schema) for keyword in schema}
        if "properties" not in used or used & _OPENING:
            return None
        return list(self.properties())

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Convert arguments that are text to the schema's types where possible."""
        properties = self.properties()
        return {
            name: _converted(value, properties.get(name, [])) for name, value in arguments.items()
        }


def _converted(text: str, options: list[Mapping[str, Any]]) -> Any:
    for option in options:
        if text in option.get("enum", ()) or text == option.get("const"):
            return text
    kinds = " ".join(str(option.get("type")) for option in options)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    value, error = decode_whole(text)
    if error or find_flaw(value):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return value


# --- The validator -------------------------------------------------------------------------------


def _make_validator(parameters: Parameters) -> Any:
    """jsonschema's validator for a schema, whose `iter_errors` raises TimeoutError after the
    deadline."""
    jsonschema = import_extra("jsonschema", "a tool", "tools")
    regex = import_extra("regex", "a tool", "tools")
    from referencing import Registry

    patterns = jsonschema.FormatChecker(formats=())
    patterns.checks("regex", raises=regex.error)(
        lambda text: not isinstance(text, str) or bool(regex.compile(text))
    )
    draft = parameters.draft
    try:
        draft.check_schema(parameters.schema, format_checker=patterns)
        _check_references(parameters)
    except jsonschema.SchemaError as error:
        raise ToolError(
            f"{parameters.where} are not a JSON schema: {error.message[:300]}"
        ) from error
    except RecursionError as error:
        raise ToolError(f"{parameters.where} are nested too deep") from error
    keywords = {
        **draft.VALIDATORS,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _without_patterns(draft.VALIDATORS["additionalProperties"]),
    }
    keywords = {name: _limited(check) for name, check in keywords.items()}
    # JSON Schema accepts 1.0 as an integer; a Python function that expects an int would get a
    # float.
    types = draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    extended = jsonschema.validators.extend(draft, keywords, type_checker=types)
    return extended(parameters.schema, registry=Registry())


def _check_references(parameters: Parameters) -> None:
    """Refuse references that lead outside or back to themselves, and keywords whose time cannot be
    bounded."""
    used = set[str]()
    checked = set[int]()
    for schema in _inside(parameters.resource):
        used.update(schema if isinstance(schema, Mapping) else ())
        for _ in parameters.reached(schema, checked=checked):
            pass
    for keywords in ({"$dynamicRef"}, {"unevaluatedProperties", "patternProperties"}):
        if keywords <= used:
            raise ToolError(
                f"{parameters.where} use {' with '.join(sorted(keywords))}, which is not supported"
            )


def _inside(resource: Any) -> Iterator[Any]:
    """Yield a schema and all schemas inside."""
    yield resource.contents
    for inner in resource.subresources():
        yield from _inside(inner)


Keyword = Callable[[Any, Any, Any, Any], Iterator[Any]]
"""jsonschema's check of one keyword: validator, the keyword's value, instance and schema to
errors."""


def _limited(check: Callable[..., Any]) -> Keyword:
    """Return a keyword's check that ends at the deadline and lets null pass where OpenAPI's
    `nullable` allows it."""

    def limited(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _seconds_left()
        if instance is not None or schema.get("nullable") is not True:
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


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[Any]:
    if isinstance(instance, Mapping):
        for pattern, inner in patterns.items():
            for key in (key for key in instance if _found(pattern, key)):
                yield from validator.descend(instance[key], inner, path=key, schema_path=pattern)


def _without_patterns(check: Keyword) -> Keyword:
    """Return the check of additional properties, which are those that match no pattern."""

    def additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties") or {}
        if patterns and isinstance(instance, Mapping):
            instance = {
                key: item
                for key, item in instance.items()
                if not any(_found(p, key) for p in patterns)
            }
        yield from check(
            validator,
            value,
            instance,
            {k: v for k, v in schema.items() if k != "patternProperties"},
        )

    return additional
