"""Strict reading of YAML mappings into dataclasses: unknown keys and wrong types fail with the key's name."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from envs.errors import ConfigError

T = TypeVar("T")


def read_options(cls: type[T], mapping: Mapping[str, Any] | None, where: str = "") -> T:
    """Build the dataclass `cls` from a YAML mapping, checking every key and type.

    Nested dataclasses, `Literal`, optional types, lists and mappings are followed; an int is accepted for a
    float, nothing else is converted. `where` prefixes the key in errors (`env.` for the `env:` mapping).

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, missing value, or the dataclass's
            own `__post_init__` refusing a combination.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where.rstrip('.') or 'config'} must be a mapping, got {mapping!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in mapping:
        if key not in fields:
            raise ConfigError(_unknown_key(key, fields, where))
    missing = [f.name for f in fields.values() if f.name not in mapping and _required(f)]
    if missing:
        raise ConfigError(f"{where}{missing[0]} is missing; it has no default")
    values = {key: _convert(hints[key], value, f"{where}{key}") for key, value in mapping.items()}
    return cls(**values)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _unknown_key(key: object, fields: Mapping[str, Any], where: str) -> str:
    near = difflib.get_close_matches(str(key), fields, n=1)
    hint = f"did you mean '{where}{near[0]}'?" if near else f"known keys: {', '.join(sorted(fields))}"
    return f"unknown key '{where}{key}'; {hint}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return `value` as `hint` wants it, or raise a ConfigError that names `where`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is typing.Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, args))}, got {value!r}")
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else read_options(hint, value, f"{where}.")
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), "a mapping", value, where)
        inner = args[1] if args else Any
        return {k: _convert(inner, v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple or (origin is not None and issubclass(origin, Sequence)):
        _expect(isinstance(value, list | tuple), "a list", value, where)
        return tuple(_convert(args[0] if args else Any, v, f"{where}[{i}]") for i, v in enumerate(value))
    return _convert_scalar(hint, value, where)


def _convert_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    options = [a for a in args if a is not type(None)]
    if len(options) == 1:
        return _convert(options[0], value, where)
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigError:
            continue
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise ConfigError(f"{where} must be {names}, got {value!r}")


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_bool_for_int = hint is int and isinstance(value, bool)
    if isinstance(value, str) and hint is float:
        # YAML 1.1 reads 1e-6 as a string; saying so saves a search.
        raise ConfigError(f"{where} must be a number, got the text {value!r} (YAML wants a dot: write 1.0e-6)")
    _expect(isinstance(value, hint) and not is_bool_for_int, f"of type {hint.__name__}", value, where)
    return value


def _expect(ok: bool, wanted: str, value: Any, where: str) -> None:
    if not ok:
        raise ConfigError(f"{where} must be {wanted}, got {value!r} ({type(value).__name__})")
