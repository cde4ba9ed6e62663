"""Overrides of a YAML's keys and of slime's flags: `KEY=VALUE` on a command line, and mappings that are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from slime_verlog import ConfigError


def read_assignments(assignments: Sequence[str], flag: str) -> dict[str, Any]:
    """`["env.max_steps=30", "n_env=4"]` as a nested mapping, `{"env": {"max_steps": 30}, "n_env": 4}`.

    Values are JSON, or else YAML, so that `1e-4` is a number.

    Raises:
        ConfigError: one of them has no key or no `=`; the text names `flag`.
    """
    read: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{flag} takes KEY=VALUE, got {assignment!r}")
        value = _value(text, flag)
        for part in reversed(key.split(".")):
            value = {part: value}
        read = merge(read, value)
    return read


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`; nested mappings are merged in the same way."""
    both = {key: merge(below[key], value) for key, value in above.items() if _nested(below.get(key), value)}
    return {**below, **above, **both}


def _nested(a: Any, b: Any) -> bool:
    return isinstance(a, Mapping) and isinstance(b, Mapping)


def _value(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: {text!r} is neither JSON nor YAML") from error
