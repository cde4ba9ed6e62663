"""The base classes of all errors and of all settings models.

Settings are read once, from the YAML, slime's `args` or a study, into frozen pydantic models.
Invalid settings are refused there, with a `ConfigError` that names the key, the value and the fix.
"""

import difflib
import errno
import os
import re
import select
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Field  # for the settings models of all packages


class SlimeVerlogError(Exception):
    """Base of every error that users can see. The text says what went wrong and what to do."""


class ConfigError(SlimeVerlogError, ValueError):
    """A setting is unknown, mistyped or impossible. The text names the key, the value and the
    fix."""


class MissingDependencyError(SlimeVerlogError, ImportError):
    """An optional package is missing. The text names the command that installs it."""


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
_FULL = "free some space"
_FORBIDDEN = "choose a folder that can be written"
_DISK_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _FORBIDDEN),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.EISDIR), _FORBIDDEN),
}
"""What to do, by the number of an error of the file system that is not a program's mistake."""
BAR_S = 0.2 if sys.stderr and sys.stderr.isatty() else 30.0
"""Seconds between two states of a progress bar; a log without a terminal keeps each of them."""


@contextmanager
def command() -> Iterator[None]:
    """Decorator `@command()` for a command's `main`: prints a `SlimeVerlogError` or Ctrl-C without
    a traceback.

    Raises SystemExit: after `error: <sentence>` on stderr with code 1, also for a full disk or a
    folder that cannot be written; after Ctrl-C with code `INTERRUPTED` and the text of the
    `KeyboardInterrupt`, or else "interrupted"; on a broken pipe silently with code 1.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except SlimeVerlogError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), 0)
        if not pipe.poll(0):  # stdout is open, so this is another pipe's error
            raise
        # Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if (sentence := disk_problem(error)) is None:
            raise
        raise SystemExit(f"error: {sentence}") from error


def disk_problem(error: OSError) -> str | None:
    """Return a sentence if the disk is full or may not be written, and None for any other error."""
    advice = _DISK_ADVICE.get(error.errno or 0)
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}; {advice}" if advice else None


class Settings(BaseModel):
    """Base of all settings: frozen, without unknown keys, converting only int to float and list to
    tuple."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, data: Any) -> Any:
        """Turn YAML's lists into tuples, and a section without keys into an empty mapping."""
        if not isinstance(data, Mapping):
            return data
        hints = {key: field.annotation for key, field in _fields(cls).items()}
        return {key: _from_yaml(hints.get(key), value) for key, value in data.items()}


S = TypeVar("S", bound=Settings)


def read_settings(model: type[S], mapping: Mapping[str, Any] | None, where: str = "") -> S:
    """Check a mapping from YAML or `args` and return it as `model`; `where`, such as `env.`,
    prefixes keys in errors.

    Raises:
        ConfigError: an unknown key (the text suggests the nearest one), a wrong type, a number out
            of range, a missing value, or a combination that the model refuses. One sentence, about
            the first mistake.
    """
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{where.rstrip('.') or 'the configuration'} must be a mapping, got {mapping!r}"
        )
    try:
        return model.model_validate(dict(mapping))
    except ValidationError as error:
        raise ConfigError(
            _explain(model, error.errors(include_url=False), mapping, where)
        ) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which also refuses keys that are given twice, and text that is not
    Unicode."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value.encode()
        except UnicodeEncodeError as error:
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} holds half of a surrogate pair",
                problem_mark=node.start_mark,
            ) from error
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        given: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in given:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            given.add(key.value)
        return node


_WRONG_VALUE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What PyYAML raises for a value that does not fit its tag, or is nested too deep."""


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of a YAML text from `place`, a file or option; errors in long texts also
    name the line.

    Raises ConfigError if it is not valid YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, *_WRONG_VALUE) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark and "\n" in text else place
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from error


def read_yaml(path: str, key: str) -> Any:
    """Return the content of a YAML file; raises ConfigError, with `key`, path and line, if it
    cannot be read."""
    if path.endswith(".py"):
        raise ConfigError(
            f"{key}: {path} is Python; give a YAML with rollout_interaction_env_path: {path} and "
            "tasks"
        )
    try:
        return parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"), f"{key}: {path}")
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not a text file in UTF-8: {error.reason}") from error


def read_yaml_mapping(path: str, key: str) -> dict[str, Any]:
    """Return the settings in a YAML file; raises ConfigError as `read_yaml`, or if it is not a
    mapping."""
    data = read_yaml(path, key)
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{key}: {path} must hold a mapping of settings, got {found}")
    return cast("dict[str, Any]", data)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`; nested mappings are merged in the same way."""
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            merged[key] = merge(below[key], value)
    return merged


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    **dict.fromkeys(("model_type", "mapping_type", "dict_type"), "a mapping"),
    "finite_number": "a finite number",
}
"""What a value must be, by the type of pydantic's error."""
_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def _explain(
    model: type[Settings], errors: Sequence[Any], mapping: Mapping[str, Any], where: str
) -> str:
    """pydantic's errors as one sentence about the first mistake in the YAML."""
    first = errors[0]
    outer = _path_of(first, mapping)
    if outer:  # an alternative that reads the value's parts says more about it
        parts = (f"{outer}.", f"{outer}[")
        first = next((e for e in errors if _path_of(e, mapping).startswith(parts)), first)
    if first["type"] == "invalid_key" or first["loc"][-1:] == ("[key]",):
        return f"key {first['input']!r} is not text; put it in quotes"
    if first["type"] == "missing":
        # A misspelled required key raises both errors; report the unknown key.
        first = next((error for error in errors if error["type"] == "extra_forbidden"), first)
    path = _path_of(first, mapping)
    key = where + path
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{key} is missing; it has no default"
    if first["type"] == "extra_forbidden":
        section = path.rpartition(".")[0]
        known = _fields(_model_at(model, first["loc"]))
        return unknown_key(key, known, f"{where}{section}." if section else where)
    # Each alternative of a type has an error of its own.
    alternatives = dict.fromkeys(
        expected(error) for error in errors if _path_of(error, mapping) == path
    )
    sentence = f"{key} must be {' or '.join(alternatives)}, got {first['input']!r}"
    if first["type"] == "float_type" and re.fullmatch(r"[-+\d.,eE]+", str(first["input"])):
        sentence += (
            " (YAML reads numbers as 0.99 and 1.0e-6: with a dot, and a sign in the exponent)"
        )
    if first["type"] == "string_type" and isinstance(first["input"], bool):
        sentence += " (YAML reads yes, no, on and off as true and false; put the word in quotes)"
    return sentence


def expected(error: Any) -> str:
    """What a value must be, in words, by an error of pydantic."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _BOUNDS:
        return f"{_BOUNDS[kind]} {next(iter(context.values())):g}"
    if kind == "literal_error":
        names = re.sub(r" or (?=\S+$)", ", ", context["expected"])
        return f"one of {names}" if "," in names else names
    return _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ")


def _path_of(error: Any, value: Any) -> str:
    """The key of an error's value, such as `tasks[0].options`, without pydantic's names of
    alternatives."""
    path = ""
    *above, last = error["loc"] or ("",)
    names_a_key = error["type"] in ("missing", "extra_forbidden")
    for part in (*above, last):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part]
        elif isinstance(value, Mapping) and part in value:
            path += f".{part}"
            value = value[part]
        elif names_a_key and part is last:
            path += f".{part}"
    return path.removeprefix(".")


def _model_at(model: type[Settings], location: Sequence[int | str]) -> type[Settings]:
    """The innermost model at pydantic's location."""
    inner = [model]
    for part in map(str, location[:-1]):
        fields = _fields(model)
        if part in fields:
            inner = list(_models_in(fields[part].annotation))
        # The part may name an alternative of a union.
        named = [one for one in inner if part.rstrip("]").endswith(one.__name__)]
        model = (named or inner or [model])[0]
    return model


def _models_in(hint: Any) -> Iterator[type[Settings]]:
    """The settings models that a type names."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        yield hint
    for part in typing.get_args(hint):
        yield from _models_in(part)


def unknown_key(key: str, known: typing.Iterable[str], where: str = "") -> str:
    """Return the sentence about an unknown key, which starts with `where`; suggests the nearest
    known one."""
    near = difflib.get_close_matches(key.removeprefix(where), list(known), n=1)
    hint = (
        f"did you mean '{where}{near[0]}'?" if near else f"known keys: {', '.join(sorted(known))}"
    )
    return f"unknown key '{key}'; {hint}"


def _fields(model: type[Settings]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _inner(hint: Any) -> Any:
    """The type without `Annotated` and `| None`."""
    if typing.get_origin(hint) is Annotated:
        return _inner(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return _inner(options[0]) if len(options) == 1 else hint
    return hint


def _from_yaml(hint: Any, value: Any) -> Any:
    inner = _inner(hint)
    alternatives = (inner, *typing.get_args(inner))
    if isinstance(value, list) and any(typing.get_origin(one) is tuple for one in alternatives):
        return tuple(value)
    if isinstance(value, Mapping) and _is_mapping(inner):
        _, of_values = typing.get_args(inner) or (Any, Any)
        return {key: _from_yaml(of_values, part) for key, part in value.items()}
    is_section = isinstance(hint, type) and issubclass(hint, Settings)
    return {} if value is None and is_section else value


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)
