"""Reads the tables of `task.toml`, and refuses keys that ask for what the sandbox does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from slime_verlog import read_yaml_mapping

EXCLUDE = "exclude the task (env.exclude)"

_KEYS: Mapping[str, Mapping[str, str | None]] = read_yaml_mapping(
    str(Path(__file__).with_name("task_keys.yaml")), "keys of tasks"
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Table:
    """One table of a task's `task.toml`. Its methods raise `ConfigError`s that name task, table and key."""

    task: str
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def table(self, key: str) -> Table:
        """The table below `key`; empty if there is none."""
        return Table(self.task, f"{self.name}.{key}".strip("."), self._get(key, (dict,), "a table") or {})

    def text(self, key: str) -> str | None:
        """The text at `key`."""
        return self._get(key, (str,), "text")

    def name_or_number(self, key: str) -> str | None:
        """The user at `key`, which may be a number."""
        value = self._get(key, (str, int), "text or a number")
        return None if value is None else str(value)

    def seconds(self, key: str) -> float | None:
        """The number above 0 at `key`."""
        value = self._get(key, (int, float), "a number")
        if value is not None and not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number greater than 0")
        return value

    def megabytes(self, key: str) -> int | None:
        """`memory_mb = 2048`, or `memory = "2G"` as in older tasks."""
        whole, text = self._get(f"{key}_mb", (int,), "an integer"), self.text(key)
        if whole is not None and whole <= 0:
            raise self.wrong(f"{key}_mb", whole, "greater than 0")
        if whole is not None or text is None:
            return whole
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMK])B?", text.strip().upper())
        if found is None:
            raise self.wrong(key, text, 'a size such as "2G"')
        return max(1, int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2]]))

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """The table `env`, with `${NAME}` and `${NAME:-default}` filled in from `given`."""
        table, found = self.table("env"), {}
        for key, value in table.values.items():
            if not isinstance(value, str):
                raise table.wrong(key, value, "text")
            for match in _VARIABLE.finditer(value):
                if match[1] not in given and match[2] is None:
                    why = f"needs the variable {match[1]}"
                    raise table.refusal(key, value, why, "set it below env.variables")
            found[key] = _VARIABLE.sub(lambda match: given.get(match[1], match[2] or ""), value)
        return found

    def refusal(self, key: str, value: Any, why: str, do: str = EXCLUDE) -> ConfigError:
        """The error about a key that cannot be honoured."""
        shown = "..." if isinstance(value, dict | list) else str(value)[:60]
        return ConfigError(f"{self.task}: {self._place(key)} = {shown} in task.toml {why}; {do}")

    def wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        """The error about a value that the format does not allow."""
        return ConfigError(f"{self.task}: {self._place(key)} in task.toml must be {expected}, got {value!r}")

    def _get(self, key: str, types: tuple[type, ...], words: str) -> Any:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise self.wrong(key, value, words)
        return value

    def _place(self, key: str) -> str:
        return f"[{self.name}] {key}" if self.name else key


def check_keys(whole: Table) -> None:
    """Raise ConfigError about the first key that asks for what is not here, or whose meaning is not known."""
    for name in _KEYS:
        table = whole.table(name) if name else whole
        for key, value in table.values.items():
            if key not in _KEYS[name]:
                raise table.refusal(key, value, "is not a known key")
            why = _KEYS[name][key]
            if why and value and not (isinstance(value, dict) and value.get("enabled") is False):
                raise table.refusal(key, value, why)
        if table.values.get("network_mode") == "allowlist":
            raise table.refusal("network_mode", "allowlist", "needs the network")
    verifier, environment = whole.table("verifier"), whole.table("environment")
    if verifier.values.get("environment_mode") == "separate":
        raise verifier.refusal("environment_mode", "separate", str(_KEYS["verifier"]["environment"]))
    system = str(environment.values.get("os", "linux")).lower()
    if system != "linux":
        raise environment.refusal("os", system, "is not Linux")
