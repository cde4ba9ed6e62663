"""Overrides of a YAML's keys and of slime's flags: `KEY=VALUE` on a command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slime_verlog import ConfigError, parse_yaml


def with_assignments(
    config: Mapping[str, Any], assignments: Sequence[str], option: str, example: str = "memory.n=4"
) -> dict[str, Any]:
    """Set keys such as `memory.n` in a copy of `config`; a ConfigError about a malformed one shows the `example`."""
    changed = dict(config)
    for assignment in assignments:
        key, text = split_assignment(assignment, option, example)
        changed = set_key(changed, key, read_value(text, assignment))
    return changed


def split_assignment(assignment: str, option: str, example: str) -> tuple[str, str]:
    """Return the key and the text of `KEY=VALUE`; raises ConfigError for another form."""
    key, equals, text = assignment.partition("=")
    if not equals or not text or not all(key.split(".")):
        raise ConfigError(f"{option} must look like {example}, got {assignment!r}")
    return key, text


def read_value(text: str, assignment: str) -> Any:
    """Return the value of an assignment; raises ConfigError if it is neither JSON nor YAML."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return parse_yaml(text, f"the value in {assignment[:100]!r}")


def set_key(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the dotted key `path` set; raises ConfigError if it leads through a scalar."""
    head, _, rest = path.partition(".")
    if not rest:
        return {**config, head: value}
    found: Any = config.get(head) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} cannot be set, because {head} is {found!r}")
    return {**config, head: set_key(cast(Mapping[str, Any], found), rest, value)}
