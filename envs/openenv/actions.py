"""Turns the text of a response into an action, and an observation into text and an image.

The server's state, which may hold the solution, is never asked for.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envs.errors import ConfigError, EnvironmentFault, describe, did_you_mean
from envs.images import open_image
from envs.json_text import decode_whole, short
from envs.loading import load_attribute
from envs.openenv.protocol import RejectedError
from envs.openenv.session import fields_of
from envs.openenv.settings import OpenEnvSettings
from envs.text_game import parse_template, text_parts
from envs.tools.results import encodable

_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_KINDS = {"integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,)}
_KINDS |= {"null": (type(None),)}
"""Types of decoded JSON."""


@dataclass(frozen=True)
class Actions:
    """How responses become actions."""

    read: Callable[[str], Mapping[str, Any]]
    """From the response's text to the action; raises `RejectedError`."""
    names: Mapping[str, str] | Sequence[str] = ()
    """All valid responses, if they can be listed."""
    fields: tuple[str, ...] = ()
    """One line per field for the prompt, if the response is JSON."""


def read_actions(settings: OpenEnvSettings, schema: Mapping[str, Any]) -> Actions:
    """Return how responses become actions; raises ConfigError for a field or path that does not exist."""
    fields, given = fields_of(schema), settings.action
    constants = {name: part["const"] for name, part in fields.items() if "const" in part}
    if given == "auto":
        free = {name: part for name, part in fields.items() if name not in constants}
        needed = [name for name in free if name in schema.get("required", ())]
        target = next(iter(free)) if len(free) == 1 else needed[0] if len(needed) == 1 else None
        names = _choices(free[target]) if target is not None and len(free) == 1 else ()
        lines = tuple(_describe(name, part, name in needed) for name, part in free.items()) if len(free) > 1 else ()
        read = lambda text: {**constants, **_read_any(text, fields, target)}
        return Actions(read, settings.actions or names, lines)
    if "." in given or ":" in given:
        function = load_attribute(given, "env.action")
        return Actions(lambda text: _call(function, given, text), settings.actions or ())
    if given not in fields:
        hint = did_you_mean(given, fields, f"it has {', '.join(fields) or 'none'}", n=1)
        raise ConfigError(f"env.action: the server's action has no field {given!r}; {hint}")
    read = lambda text: {**constants, given: _convert(given, text, fields[given])}
    return Actions(read, settings.actions or _choices(fields[given]))


def _read_any(text: str, fields: Mapping[str, Mapping[str, Any]], target: str | None) -> dict[str, Any]:
    """Read JSON for all fields, or other text for the target field."""
    body = _unfenced(text)
    if body.startswith("{"):
        value, error = decode_whole(body)
        if not error and isinstance(value, dict) and set(value) <= {*fields, "metadata"}:
            return value
    if target is None:
        raise RejectedError(f"the answer is not a JSON object with the fields {', '.join(fields)}")
    return {target: _convert(target, text, fields[target])}


def _call(function: Callable[[str], Any], path: str, text: str) -> Mapping[str, Any]:
    action = call_user_function(function, f"env.action: {path}", text)
    if action is None:
        raise RejectedError("the answer is not an action")
    if not isinstance(action, Mapping):
        raise EnvironmentFault(f"env.action: {path} returned {short(action)}, not a mapping or None")
    return action


def _convert(name: str, text: str, schema: Mapping[str, Any]) -> Any:
    """Read the text as a value of the field's type; refuse it if it is not one."""
    if choices := schema.get("enum"):
        found = [choice for choice in choices if str(choice).lower() == text.strip().lower()]
        if not found:
            raise RejectedError(f"{name} must be one of {', '.join(map(str, choices))}")
        return found[0]
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text
    value, error = decode_whole(_unfenced(text))
    if error or not any(type(value) in _KINDS.get(kind, ()) for kind in kinds):
        raise RejectedError(f"{name} must be of type {' or '.join(kinds)}, got {short(text)}")
    return value


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a field may have; empty for any."""
    options = schema.get("anyOf") or schema.get("oneOf") or [schema]
    kinds = [option.get("type", "string") for option in options if isinstance(option, Mapping)]
    return [kind for part in kinds for kind in (part if isinstance(part, list) else [part])]


def _choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, schema.get("enum") or ()))


def _describe(name: str, schema: Mapping[str, Any], required: bool) -> str:
    kind = f"one of {', '.join(_choices(schema))}" if "enum" in schema else " or ".join(_kinds(schema))
    about = schema.get("description", "")
    return f"{name} ({kind}{'' if required else ', optional'}){': ' * bool(about)}{about}"


def _unfenced(text: str) -> str:
    found = _FENCED.fullmatch(text.strip())
    return (found[1] if found else text).strip()


HIDDEN = frozenset({"metadata", "state", "done", "reward"})
"""Keys that the default text leaves out: they may hold the solution."""

Parts = tuple[str, str]
"""BALROG's long-term and short-term text."""
T = TypeVar("T")


def make_reader(settings: OpenEnvSettings) -> Callable[[Mapping[str, Any]], Parts]:
    """Return the function from observation to text, which is encodable; raises ConfigError as `read_actions`."""
    given = settings.observation
    if given is None:
        read: Callable[[Mapping[str, Any]], Parts] = lambda observation: (as_lines(observation, settings.picture), "")
    elif "{{" in given or "{%" in given:
        read = _template(given)
    else:
        function, label = load_attribute(given, "env.observation"), f"env.observation: {given}"
        read = lambda observation: _parts(call_user_function(function, label, observation), label)
    return lambda observation: tuple(map(encodable, read(observation)))  # type: ignore[return-value]


def call_user_function(function: Callable[..., T], label: str, *arguments: Any) -> T:
    """Call a function that the YAML names; its errors become an EnvironmentFault that begins with `label`."""
    try:
        return function(*arguments)
    except Exception as error:
        raise EnvironmentFault(f"{label}: {describe(error)}") from error


def as_lines(observation: Mapping[str, Any], image: str | None = None) -> str:
    """Return one line `key: value` per key that has a value."""
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in observation.items()
        if key not in HIDDEN and key != image and value not in (None, "", [], {})
    )


def read_image(observation: Mapping[str, Any], key: str) -> Any:
    """Return the image under a key as RGB PIL image; raises EnvironmentFault if there is none to read."""
    value = observation.get(key)
    if not isinstance(value, str):
        raise EnvironmentFault(f"the observation has no picture under {key!r} (env.picture): it has {short(value)}")
    try:
        data = base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
    except ValueError as error:
        raise EnvironmentFault(f"the observation's picture {key!r} is not base64: {error}") from error
    return open_image(data)


def _template(text: str) -> Callable[[Mapping[str, Any]], Parts]:
    import jinja2

    try:
        template = parse_template(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"env.observation: {error}") from error

    def render(observation: Mapping[str, Any]) -> Parts:
        try:
            return template.render(observation).strip(), ""
        except Exception as error:  # a template can raise anything
            why = f"{error}; the observation has the keys {', '.join(observation)}"
            raise EnvironmentFault(f"env.observation cannot be rendered: {why}") from error

    return render


def _parts(value: Any, label: str) -> Parts:
    parts = text_parts(value)
    if parts is None:
        raise EnvironmentFault(f"{label} returned {short(value)}, not text or two texts")
    return parts
