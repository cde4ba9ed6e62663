"""The base classes of all errors and of all settings models.

Settings are read once, from the YAML, slime's `args` or a study, into frozen pydantic models. Invalid settings are
refused there, with a `ConfigError` that names the key, the value and the fix.
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
from typing import Annotated, Any, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Field  # for the settings models of all packages


class SlimeVerlogError(Exception):
    """Base of every error that users can see. The text says what went wrong and what to do."""


class ConfigError(SlimeVerlogError, ValueError):
    """A setting is unknown, mistyped or impossible. The text names the key, the value and the fix."""


class MissingDependencyError(SlimeVerlogError, ImportError):
    """An optional package is missing. The text names the command that installs it."""


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
_FULL, _FORBIDDEN = "free some space", "choose a folder that can be written"
_DISK_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _FORBIDDEN),
}
"""What to do, by the number of an error of the file system that is not a program's mistake."""
BAR_S = 0.2 if sys.stderr and sys.stderr.isatty() else 30.0
"""Seconds between two states of a progress bar; a log without a terminal keeps each of them."""


@contextmanager
def command() -> Iterator[None]:
    """Decorator `@command()` for a command's `main`: prints a `SlimeVerlogError` or Ctrl-C without a traceback.

    Raises SystemExit: after `error: <sentence>` on stderr with code 1, also for a full disk or a folder that cannot be
    written; after Ctrl-C with code `INTERRUPTED` and the text of the `KeyboardInterrupt`, or else "interrupted"; on a
    broken pipe silently with code 1.
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
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
    """Base of all settings: frozen, without unknown keys, converting only int to float and list to tuple."""

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
    """Check a mapping from YAML or `args` and return it as `model`; `where`, such as `env.`, prefixes keys in errors.

    Raises:
        ConfigError: an unknown key (the text suggests the nearest one), a wrong type, a number out of range, a missing
            value, or a combination that the model refuses. One sentence, about the first mistake.
    """
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where.rstrip('.') or 'the configuration'} must be a mapping, got {mapping!r}")
    try:
        return model.model_validate(dict(mapping))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A misspelled required key raises both errors; report the unknown key.
        unknown = (one for one in errors if one["type"] == "extra_forbidden")
        told = next(unknown, errors[0]) if errors[0]["type"] == "missing" else errors[0]
        raise ConfigError(_explain(model, told, where)) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which also refuses keys that are given twice, and names the line of a wrong value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        given: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in given:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            given.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{str(node.value)[:60]!r} is not a valid {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of a YAML text from `place`, a file or option; errors in long texts also name the line.

    Raises ConfigError if it is not valid YAML, gives a key twice, or is nested too deep.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ConfigError(f"{place} is not valid YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark and "\n" in text else place
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from error


def read_yaml(path: str, key: str) -> Any:
    """Return the content of a YAML file; raises ConfigError, with `key`, path and line, if it cannot be read."""
    if path.endswith(".py"):
        raise ConfigError(f"{key}: {path} is Python; give a YAML with rollout_interaction_env_path: {path} and tasks")
    try:
        return parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"), f"{key}: {path}")
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not a text file in UTF-8: {error.reason}") from error


def read_yaml_mapping(path: str, key: str) -> dict[str, Any]:
    """Return the settings in a YAML file; raises ConfigError as `read_yaml`, or if it is not a mapping."""
    data = read_yaml(path, key)
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{key}: {path} must hold a mapping of settings, got {found}")
    return cast("dict[str, Any]", data)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`; nested mappings are merged in the same way."""
    nested = [key for key in above if isinstance(above[key], Mapping) and isinstance(below.get(key), Mapping)]
    return {**below, **above, **{key: merge(below[key], above[key]) for key in nested}}


def _explain(model: type[Settings], error: Any, where: str) -> str:
    """pydantic's error as one sentence about the YAML."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    path, hint, holder = _locate(model, error["loc"])
    key = where + path
    match kind:
        case "value_error":
            return str(context["error"])
        case "extra_forbidden":
            return unknown_key(key, _fields(holder), where + path.rpartition(".")[0] + "." * ("." in path))
        case "missing":
            return f"{key} is missing; it has no default"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            words = {"greater_than": "greater than", "greater_than_equal": "at least", "less_than": "less than"}
            return f"{key} must be {words.get(kind, 'at most')} {next(iter(context.values())):g}, got {value!r}"
        case "string_too_long":
            return f"{key} must have at most {context['max_length']} characters, got {len(value)}"
        case "finite_number":
            return f"{key} must be a finite number, got {value!r}"
    number = _as_yaml_number(value) if kind == "float_type" and isinstance(value, str) else ""
    note = f" (YAML wants a dot: write {number})" if number else ""
    return f"{key} must be {_words(hint)}, got {value!r}{note}"


def _as_yaml_number(text: str) -> str:
    """Return how YAML writes the number that a text means, such as `0,99` or `1e-6`; empty if it means none."""
    number = re.fullmatch(r"([+-]?\d+)(?:[.,](\d*))?(?:[eE]([+-]?)(\d+))?", text.strip())
    if number is None:
        return ""
    whole, fraction, sign, exponent = number.groups()
    return f"{whole}.{fraction or 0}" + (f"e{sign or '+'}{exponent}" if exponent else "")


def unknown_key(key: str, known: typing.Iterable[str], where: str = "") -> str:
    """Return the sentence about an unknown key, which starts with `where`; suggests the nearest known one."""
    near = difflib.get_close_matches(key.removeprefix(where), list(known), n=1)
    hint = f"did you mean '{where}{near[0]}'?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key '{key}'; {hint}"


def _fields(model: type[Settings]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _locate(model: type[Settings], location: Sequence[int | str]) -> tuple[str, Any, type[Settings]]:
    """The key at pydantic's location, the type expected there, and the innermost model that contains it."""
    path, hint, holder = "", typing.cast(Any, model), model
    for part in location:
        inner = _inner(hint)
        if isinstance(part, int):
            path, hint = f"{path}[{part}]", (typing.get_args(inner) or (Any,))[0]
        elif isinstance(inner, type) and issubclass(inner, Settings):
            holder = inner
            path = f"{path}.{part}" if path else part
            hint = _fields(inner)[part].annotation if part in _fields(inner) else Any
        elif _is_mapping(inner):
            path, hint = f"{path}.{part}", (*typing.get_args(inner), Any, Any)[1]
        else:  # the name of one alternative of a union
            named = part.rstrip("]").rpartition(" ")[2]  # a model with a validator is `function-after[f(), Model]`
            models = (o for o in typing.get_args(inner) if isinstance(o, type) and issubclass(o, Settings))
            hint = next((model for model in models if model.__name__ == named), inner)
            if hint is inner or part == location[-1]:
                return path, inner, holder
    return path, hint, holder


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
    if isinstance(value, list) and any(typing.get_origin(part) is tuple for part in (inner, *typing.get_args(inner))):
        return tuple(value)
    if isinstance(value, Mapping) and _is_mapping(inner):
        return {key: _from_yaml((*typing.get_args(inner), Any, Any)[1], part) for key, part in value.items()}
    return {} if value is None and isinstance(hint, type) and issubclass(hint, Settings) else value


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _words(hint: Any) -> str:
    hint = _inner(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(option) for option in typing.get_args(hint) if option is not type(None))
    if origin is Literal:
        options = typing.get_args(hint)
        return f"{'one of ' if len(options) > 1 else ''}{', '.join(map(repr, options))}"
    if origin is tuple:
        return "a list"
    if _is_mapping(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, f"a {hint}")
