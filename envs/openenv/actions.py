"""Turns the text of a response into an action, and an observation into text and an image.

The server's state, which may hold the solution, is never asked for.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envs.errors import ConfigError, EnvironmentFault, check_known, describe
from envs.images import open_image
from envs.json_text import decode_whole, short
from envs.loading import load_attribute
from envs.openenv.protocol import RejectedError
from envs.openenv.settings import OpenEnvSettings
from envs.templates import parse_template
from envs.text_game import text_parts
from envs.tools.results import encodable
from envs.tools.schema import Parameters

_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True)
class ActionField:
    """One field of the server's action, as its schema describes it."""

    kinds: tuple[str, ...]
    """JSON types that it may have; empty for any."""
    choices: tuple[Any, ...]
    """All values that it may have, if the schema lists them."""
    constant: Any
    """Its only value; None if it may have others."""
    required: bool
    about: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the choices as text."""
        return tuple(map(str, self.choices))


@dataclass(frozen=True)
class Actions:
    """How responses become actions."""

    read: Callable[[str], Mapping[str, Any]]
    """From the response's text to the action; raises `RejectedError`."""
    names: Mapping[str, str] | Sequence[str] = ()
    """All valid responses, if they can be listed."""
    fields: tuple[str, ...] = ()
    """One line per field for the prompt, if the response is JSON."""


def fields_of(schema: Mapping[str, Any]) -> dict[str, ActionField]:
    """Return the fields of the server's action by name, without `metadata`."""
    fields = {}
    for name, options in Parameters(schema).properties().items():
        leaves = [option for option in options if not {"type", "enum", "const"}.isdisjoint(option)]
        values = [leaf for leaf in leaves if leaf.get("type") != "null"]
        choices: list[Any] = []
        if all("enum" in leaf for leaf in values):
            choices = [choice for leaf in values for choice in leaf["enum"]]
        fields[name] = ActionField(
            kinds=tuple(dict.fromkeys(leaf.get("type", "string") for leaf in leaves)),
            choices=tuple(choices),
            constant=leaves[0].get("const") if len(leaves) == 1 else None,
            required=name in schema.get("required", ()),
            about=next(
                (option["description"] for option in options if "description" in option), ""
            ),
        )
    fields.pop("metadata", None)
    return fields


def read_actions(settings: OpenEnvSettings, schema: Mapping[str, Any]) -> Actions:
    """Return how responses become actions; raises ConfigError for a field or path that does not
    exist."""
    fields = fields_of(schema)
    given = settings.action
    constants = {
        name: field.constant for name, field in fields.items() if field.constant is not None
    }
    if given == "auto":
        free = {name: field for name, field in fields.items() if name not in constants}
        candidates = [name for name, field in free.items() if field.required or len(free) == 1]
        target = candidates[0] if len(candidates) == 1 else None
        read = lambda text: {**constants, **_read_any(text, fields, target)}
        if len(free) == 1 and target is not None:
            return Actions(read, settings.actions or free[target].names)
        lines = tuple(_describe(name, field) for name, field in free.items())
        return Actions(read, settings.actions or (), lines)
    if "." in given or ":" in given:
        function = load_attribute(given, "env.action")
        return Actions(lambda text: _call(function, given, text), settings.actions or ())
    check_known(
        given,
        fields,
        f"env.action: the server's action has no field {given!r}",
        f"it has {', '.join(fields)}",
    )
    read = lambda text: {**constants, given: _convert(given, text, fields[given])}
    return Actions(read, settings.actions or fields[given].names)


def _read_any(text: str, fields: Mapping[str, ActionField], target: str | None) -> dict[str, Any]:
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
        raise EnvironmentFault(
            f"env.action: {path} returned {short(action)}, not a mapping or None"
        )
    return action


def _convert(name: str, text: str, field: ActionField) -> Any:
    """Read the text as one of the field's choices or as JSON; whether its type fits is for the
    server to say."""
    if field.choices:
        for choice in field.choices:
            if str(choice).lower() == text.strip().lower():
                return choice
        raise RejectedError(f"{name} must be one of {', '.join(field.names)}")
    if not field.kinds or "string" in field.kinds:
        return text
    value, error = decode_whole(_unfenced(text))
    if error:
        raise RejectedError(f"{name} must be of type {' or '.join(field.kinds)}, got {short(text)}")
    return value


def _describe(name: str, field: ActionField) -> str:
    kind = f"one of {', '.join(field.names)}" if field.choices else " or ".join(field.kinds)
    about = f": {field.about}" if field.about else ""
    return f"{name} ({kind}{'' if field.required else ', optional'}){about}"


def _unfenced(text: str) -> str:
    found = _FENCED.fullmatch(text.strip())
    return (found[1] if found else text).strip()


HIDDEN = frozenset({"metadata", "state", "done", "reward"})
"""Keys that the default text leaves out: they may hold the solution."""

Parts = tuple[str, str]
"""BALROG's long-term and short-term text."""
T = TypeVar("T")


def make_reader(settings: OpenEnvSettings) -> Callable[[Mapping[str, Any]], Parts]:
    """Return the function from observation to text, which is encodable; raises ConfigError as
    `read_actions`."""
    given = settings.observation
    if given is None:
        read: Callable[[Mapping[str, Any]], Any] = lambda observation: as_lines(
            observation, settings.picture
        )
    elif "{{" in given or "{%" in given:
        read = _template(given)
    else:
        function = load_attribute(given, "env.observation")
        read = lambda observation: call_user_function(
            function, f"env.observation: {given}", observation
        )

    def parts(observation: Mapping[str, Any]) -> Parts:
        value = read(observation)
        found = text_parts(value)
        if found is None:
            raise EnvironmentFault(
                f"env.observation: {given} returned {short(value)}, not text or two texts"
            )
        return encodable(found[0]), encodable(found[1])

    return parts


def call_user_function(function: Callable[..., T], label: str, *arguments: Any) -> T:
    """Call a function that the YAML names; its errors become an EnvironmentFault that begins with
    `label`."""
    try:
        return function(*arguments)
    except Exception as error:
        raise EnvironmentFault(f"{label}: {describe(error)}") from error


def as_lines(observation: Mapping[str, Any], image: str | None = None) -> str:
    """Return one line `key: value` per key that has a value."""
    lines = []
    for key, value in observation.items():
        if key in HIDDEN or key == image or value in (None, "", [], {}):
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{key}: {text}")
    return "\n".join(lines)


def read_image(observation: Mapping[str, Any], key: str) -> Any:
    """Return the image under a key as RGB PIL image; raises EnvironmentFault if there is none to
    read."""
    value = observation.get(key)
    if not isinstance(value, str):
        raise EnvironmentFault(
            f"the observation has no picture under {key!r} (env.picture): it has {short(value)}"
        )
    try:
        data = base64.b64decode(
            value.partition(",")[2] if value.startswith("data:") else value, validate=True
        )
    except ValueError as error:
        raise EnvironmentFault(
            f"the observation's picture {key!r} is not base64: {error}"
        ) from error
    return open_image(data)


def _template(text: str) -> Callable[[Mapping[str, Any]], str]:
    import jinja2

    try:
        template = parse_template(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"env.observation: {error}") from error

    def render(observation: Mapping[str, Any]) -> str:
        try:
            return template.render(observation).strip()
        except Exception as error:  # a template can raise anything
            why = f"{error}; the observation has the keys {', '.join(observation)}"
            raise EnvironmentFault(f"env.observation cannot be rendered: {why}") from error

    return render
