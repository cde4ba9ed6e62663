"""The check of a call's arguments against a JSON schema from elsewhere, in limited time.

A schema is refused when its tool is listed if it refers to something outside itself, or to itself without end. What
remains may still be slow on some arguments, so every check has a deadline; patterns run in the package `regex`, which
can be interrupted.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from envs.errors import MissingDependencyError, ToolError
from envs.tools.calls import short

CHECK_S = 1.0
"""Seconds that one check of arguments may take."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose value is not a schema."""
_deadline: ContextVar[float] = ContextVar("deadline")


def make_validator(schema: Mapping[str, Any], where: str) -> Any:
    """jsonschema's validator for a schema, whose `iter_errors` raises TimeoutError after the deadline.

    Raises:
        ToolError: the schema is not one, or has references or patterns that cannot be used.
        MissingDependencyError: a package is not installed.
    """
    try:
        import jsonschema.validators
        import regex  # noqa: F401 - imported here, so that an error comes before the first call
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "tools need jsonschema and regex; install them with: pip install 'slime-verlog[tools]'"
        ) from error
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


def first_error(validator: Any, arguments: Mapping[str, Any]) -> Any:
    """The most telling error in the arguments; None if there is none.

    Raises:
        TimeoutError: the check takes longer than `CHECK_S`.
    """
    from jsonschema.exceptions import best_match

    token = _deadline.set(time.monotonic() + CHECK_S)
    try:
        return best_match(validator.iter_errors(dict(arguments)))
    finally:
        _deadline.reset(token)


def _check_parts(root: Mapping[str, Any], where: str) -> None:
    """Check the patterns and references of all parts of a schema."""
    parts, checked = list(_parts(root)), set[int]()
    if any("$ref" in part for part in parts) and any("$id" in part for part in parts):
        raise ToolError(f"{where} have both $id and $ref; leave out $id")
    for keys in (("$dynamicRef",), ("unevaluatedProperties", "patternProperties")):
        if all(any(key in part for part in parts) for key in keys):
            raise ToolError(f"{where} use {' with '.join(keys)}, which is not supported")
    for part in parts:
        for pattern in [*filter(None, [part.get("pattern")]), *part.get("patternProperties", ())]:
            _check_pattern(pattern, where)
        _check_loops(part, root, where, checked, ())


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas inside a schema, and itself."""
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
    """What a reference inside the schema leads to."""
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


def _check_pattern(pattern: str, where: str) -> None:
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ToolError(f"{where} have a pattern that cannot be read, {short(pattern)}: {error}") from error


Keyword = Callable[[Any, Any, Any, Any], Iterator[Any]]


def _limited(check: Callable[..., Any]) -> Keyword:
    """A keyword's check that ends at the deadline."""

    def limited(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if time.monotonic() > _deadline.get(float("inf")):
            raise TimeoutError
        yield from check(validator, value, instance, schema) or ()

    return limited


def _found(pattern: str, text: str) -> bool:
    import regex

    left = _deadline.get(float("inf")) - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return regex.search(pattern, text, timeout=min(left, CHECK_S)) is not None


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
    """The check of additional properties, which are those that match no pattern."""

    def additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties") or {}
        if patterns and isinstance(instance, Mapping):
            instance = {key: item for key, item in instance.items() if not any(_found(p, key) for p in patterns)}
        yield from check(validator, value, instance, {k: v for k, v in schema.items() if k != "patternProperties"})

    return additional
