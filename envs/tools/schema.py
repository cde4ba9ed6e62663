"""JSON schemas of tools: inferred from functions, completed to OpenAI's form, and checked against calls.

jsonschema checks a call by the rules of the schema's own draft. Names that the outermost object does not describe are
refused. A schema is refused when its tool is listed if it refers to something outside itself, or to itself without
end. What remains may still be slow on some arguments, so every check has a deadline; patterns run in the package
`regex`, which can be interrupted.
"""

import copy
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
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
_OPENING = {"additionalProperties", "unevaluatedProperties", "dependencies"}
"""Keywords of an outermost object that itself says which other names it takes."""
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
    return {"type": "function", "function": {**copy.deepcopy(dict(function)), "parameters": dict(parameters)}}


class ArgumentCheck:
    """Checks the arguments of calls against one tool's schema."""

    def __init__(self, schema: Schema) -> None:
        self.name: str = schema["function"]["name"]
        self._parameters = schema["function"]["parameters"]
        self._validator = _make_validator(self._parameters, f"the parameters of {self.name}")
        self._names = _closed_names(self._parameters)

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
            where = ".".join(map(str, error.absolute_path))
            message = error.message.encode("utf-8", "backslashreplace").decode()
            message = message if len(message) <= 300 else message[:297] + "..."
            return f"{self.name}: {where + ': ' if where else ''}{message}"
        if self._names is None:
            return None
        unknown = next((name for name in arguments if name not in self._names), None)
        known = ", ".join(self._names) or "none"
        return None if unknown is None else f"{self.name}: there is no argument {short(unknown)}; there are {known}"

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Convert arguments from markup, which are text, to the schema's types where possible."""
        return convert_texts(arguments, self._parameters)


def convert_texts(arguments: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments that are text to the types of a tool's `parameters` where possible."""
    options = properties_of(parameters)
    return {key: _converted(value, options.get(key, [])) for key, value in arguments.items()}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the schemas that apply to each argument, through references, alternatives and conditions."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for part in _reached(root_of(parameters, "the parameters")):
        for name, schema in part.get("properties").items():
            options = [option.schema for option in _reached(part.at(schema))]
            found.setdefault(name, []).extend(option for option in options if isinstance(option, Mapping))
    return found


def _closed_names(parameters: Mapping[str, Any]) -> list[str] | None:
    """Return the only names that arguments may have; None if the schema describes none, or itself takes others."""
    outermost = [part.schema for part in _reached(root_of(parameters, "the parameters"))]
    used = {keyword for schema in outermost for keyword in schema}
    if "properties" not in used or used & _OPENING:
        return None
    return list(properties_of(parameters))


def _converted(text: str, options: list[Mapping[str, Any]]) -> Any:
    allowed = lambda kind: any(kind in option.get("type", ()) for option in options)
    listed = any(text in option.get("enum", ()) or text == option.get("const") for option in options)
    if listed or (allowed("string") and not (text == "null" and allowed("null"))):
        return text
    value, error = decode_whole(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text) if error or find_flaw(value) else value


# --- The parts of a schema -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A schema inside of a tool's parameters; `resolver` knows what its references mean."""

    schema: Any
    resolver: Any
    draft: Any
    where: str

    def at(self, schema: Any) -> "Part":
        """Return a schema that is written inside of this one."""
        resolver = self.resolver.in_subresource(self.draft.create_resource(schema))
        return Part(schema, resolver, self.draft, self.where)

    def get(self, keyword: str) -> Mapping[str, Any]:
        """Return the keyword's mapping; empty without one."""
        found = self.schema.get(keyword) if isinstance(self.schema, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def inside(self) -> "Iterator[Part]":
        """Yield all schemas inside, and this one."""
        yield self
        for inner in self.draft.create_resource(self.schema).subresources():
            yield from self.at(inner.contents).inside()

    def alternatives(self, keywords: tuple[str, ...] = _ALTERNATIVES) -> "list[Part]":
        """Return the schemas of the keywords and of `$ref`; raises ToolError for an unknown reference."""
        from referencing.exceptions import Unresolvable

        if not isinstance(self.schema, Mapping):
            return []
        found = [self.at(inner) for keyword in keywords for inner in self.schema.get(keyword, ())]
        reference = self.schema.get("$ref")
        if reference is None:
            return found
        try:
            target = self.resolver.lookup(reference)
        except (Unresolvable, AttributeError, TypeError, ValueError) as error:
            supported = "only references such as #/$defs/NAME are supported"
            wrong = f"refer to {short(reference)}, which is not in them; {supported}"
            raise ToolError(f"{self.where} {wrong}") from error
        return [*found, Part(target.contents, target.resolver, self.draft, self.where)]

    def same_value(self) -> "list[Part]":
        """Return the schemas that are applied to the same value: alternatives, references and conditions."""
        conditions = [self.at(self.schema[key]) for key in ("not", "if", "then", "else") if key in self.schema]
        return [*self.alternatives(), *conditions, *map(self.at, self.get("dependentSchemas").values())]


def root_of(parameters: Mapping[str, Any], where: str) -> Part:
    """Return the whole schema, read by the rules of the draft that `$schema` names; 2020-12 without it."""
    from referencing import Registry
    from referencing.jsonschema import specification_with

    draft = specification_with(_draft_of(parameters).META_SCHEMA["$schema"])
    return Part(parameters, Registry().resolver_with_root(draft.create_resource(parameters)), draft, where)


def _reached(part: Part, above: tuple[int, ...] = (), checked: set[int] | None = None) -> Iterator[Part]:
    """Yield the part and what is applied to the same value; raises ToolError if references lead back to it."""
    checked = set() if checked is None else checked
    if not isinstance(part.schema, Mapping) or id(part.schema) in checked:
        return
    if id(part.schema) in above:
        raise ToolError(f"{part.where} refer to themselves without end ({short(part.schema)})")
    yield part
    for inner in part.same_value():
        yield from _reached(inner, (*above, id(part.schema)), checked)
    checked.add(id(part.schema))


def _draft_of(schema: Mapping[str, Any]) -> Any:
    """Return jsonschema's validator of the schema's draft."""
    jsonschema = import_extra("jsonschema", "a tool", "tools")
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


# --- The validator -------------------------------------------------------------------------------------------------


def _make_validator(schema: Mapping[str, Any], where: str) -> Any:
    """jsonschema's validator for a schema, whose `iter_errors` raises TimeoutError after the deadline."""
    jsonschema = import_extra("jsonschema", "a tool", "tools")
    regex = import_extra("regex", "a tool", "tools")
    from referencing import Registry

    patterns = jsonschema.FormatChecker(formats=())
    patterns.checks("regex", raises=regex.error)(lambda text: not isinstance(text, str) or bool(regex.compile(text)))
    try:
        draft = _draft_of(schema)
        draft.check_schema(schema, format_checker=patterns)
        _check_parts(root_of(schema, where))
    except jsonschema.SchemaError as error:
        raise ToolError(f"{where} are not a JSON schema: {error.message[:300]}") from error
    except RecursionError as error:
        raise ToolError(f"{where} are nested too deep") from error
    keywords = {name: _limited(check) for name, check in {**draft.VALIDATORS, "pattern": _pattern}.items()}
    # JSON Schema accepts 1.0 as an integer; a Python function that expects an int would get a float.
    types = draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return jsonschema.validators.extend(draft, keywords, type_checker=types)(schema, registry=Registry())


def _check_parts(root: Part) -> None:
    """Refuse references that lead outside or back to themselves, and keywords whose time cannot be bounded."""
    parts, checked = [*root.inside()], set[int]()
    used = {keyword for part in parts if isinstance(part.schema, Mapping) for keyword in part.schema}
    for keyword in ("$dynamicRef", "patternProperties"):
        if keyword in used:
            raise ToolError(f"{root.where} use {keyword}, which is not supported")
    for part in parts:
        for _ in _reached(part, checked=checked):
            pass


def _limited(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """Return a keyword's check that ends at the deadline and lets null pass where OpenAPI's `nullable` allows it."""

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


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    import regex
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str):
        seconds = min(_seconds_left(), CHECK_S)
        if regex.search(pattern, instance, timeout=seconds) is None:
            yield ValidationError(f"{instance!r} does not match {pattern!r}")
