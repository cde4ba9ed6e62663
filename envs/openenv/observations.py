"""Turns an observation into text and a picture. The server's state, which may hold the solution, is never asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from envs.errors import ConfigError, EnvironmentFault, describe
from envs.loading import load_attribute
from envs.openenv.settings import OpenEnvSettings
from envs.questions.pictures import open_picture
from envs.tools.calls import short
from envs.tools.results import encodable

HIDDEN = frozenset({"metadata", "state", "done", "reward"})
"""Keys that the default text leaves out: they may hold the solution."""

Parts = tuple[str, str]
"""BALROG's long-term and short-term text."""
T = TypeVar("T")


def make_reader(settings: OpenEnvSettings) -> Callable[[Mapping[str, Any]], Parts]:
    """The function from an observation to its text. Halves of surrogate pairs, which tokenizers refuse, become `?`.

    Raises:
        ConfigError: the template does not parse, or the import path leads nowhere.
    """
    given = settings.observation
    if given is None:
        read: Callable[[Mapping[str, Any]], Parts] = lambda observation: (as_lines(observation, settings.picture), "")
    elif "{{" in given or "{%" in given:
        read = _template(given)
    else:
        function, label = load_attribute(given, "env.observation"), f"env.observation: {given}"
        read = lambda observation: _parts(call_user_function(function, label, observation), given)
    return lambda observation: tuple(map(encodable, read(observation)))  # type: ignore[return-value]


def call_user_function(function: Callable[..., T], label: str, *arguments: Any) -> T:
    """Call a function that the user's YAML names.

    Raises:
        EnvironmentFault: it raised an exception; the text begins with `label` and names the place.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise EnvironmentFault(f"{label}: {describe(error)}") from error


def as_lines(observation: Mapping[str, Any], picture: str | None = None) -> str:
    """One line `key: value` per key that has a value."""
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in observation.items()
        if key not in HIDDEN and key != picture and value not in (None, "", [], {})
    )


def read_picture(observation: Mapping[str, Any], key: str) -> Any:
    """The picture under a key, as an RGB PIL image.

    Raises:
        EnvironmentFault: there is none, or it cannot be read.
    """
    value = observation.get(key)
    if not isinstance(value, str):
        raise EnvironmentFault(f"the observation has no picture under {key!r} (env.picture): it has {short(value)}")
    try:
        data = base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
    except ValueError as error:
        raise EnvironmentFault(f"the observation's picture {key!r} is not base64: {error}") from error
    return open_picture(data)


def _template(text: str) -> Callable[[Mapping[str, Any]], Parts]:
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    jinja = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        template = jinja.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"env.observation: {error}") from error

    def render(observation: Mapping[str, Any]) -> Parts:
        try:
            return template.render(observation).strip(), ""
        except Exception as error:  # a template can raise anything
            raise EnvironmentFault(
                f"env.observation cannot be rendered: {error}; the observation has the keys {', '.join(observation)}"
            ) from error

    return render


def _parts(value: Any, path: str) -> Parts:
    found = value if isinstance(value, Mapping) else {"long_term_context": value}
    parts = found.get("long_term_context"), found.get("short_term_context", "")
    if not isinstance(parts[0], str) or not isinstance(parts[1], str):
        raise EnvironmentFault(f"env.observation: {path} returned {short(value)}, not text or two texts")
    return parts[0], parts[1]
