"""Tasks in SWE-Gym's format, read from JSON, JSON lines or parquet."""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from envs.errors import ConfigError
from envs.questions import ParquetRows, read_rows
from slime_verlog import Field, Settings, read_settings

_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


class Instance(Settings):
    """One task: the tree at `base_commit` of `repo`, the statement, and the tests that decide.

    `patch` is the reference solution (never shown), `test_patch` what the tests' files get before
    judging; `fail_to_pass` must turn green, `pass_to_pass` must stay green, both as pytest's node
    ids.
    """

    model_config = ConfigDict(extra="ignore")

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...] = Field(alias=_TESTS[0])
    pass_to_pass: tuple[str, ...] = Field(alias=_TESTS[1])
    draw_arguments: bool = Field(default=True, alias="DRAW_ARGUMENTS")
    """Our own column: judge readable tests with other arguments too, on which the reference
    solution decides."""

    def __hash__(self) -> int:
        return hash((self.instance_id, self.repo, self.base_commit))

    @property
    def required(self) -> tuple[str, ...]:
        """All tests that decide, each once."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    def row(self) -> dict[str, Any]:
        """The instance in SWE-Gym's columns, with ours where it differs from the default."""
        return self.model_dump(
            mode="json", by_alias=True, exclude={"draw_arguments"} if self.draw_arguments else None
        )


def read_instance(row: Mapping[str, Any], where: str = "instance") -> Instance:
    """Build an instance from a row; unknown columns are left aside. Raises ConfigError for wrong
    ones."""
    name = row.get("instance_id")
    where = f"{where} ({name})" if isinstance(name, str) else where
    tests = {key: _read_tests(row.get(key), f"{where}: {key}") for key in _TESTS}
    if not tests["FAIL_TO_PASS"]:
        raise ConfigError(f"{where}: FAIL_TO_PASS is empty, so nothing could be solved")
    patches = {key: "" for key in ("patch", "test_patch") if row.get(key) is None}
    return read_settings(Instance, {**row, **patches, **tests}, f"{where}: ")


def _read_tests(value: Any, where: str) -> tuple[str, ...]:
    """Test ids as a list, as an array, or (SWE-bench) as a list written in JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where} is text that is not a JSON list: {value[:80]!r}") from error
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{where} must be a list of test ids, got {str(value)[:80]!r}")
    return tuple(value)


def load_instances(path: str | Path) -> Mapping[str, Instance]:
    """Read a file's instances by id, again after an edit; raises ConfigError for missing or damaged
    ones."""
    path = Path(path).expanduser()
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"env.instances: {path} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=8)
def _load(path: Path, _mtime: int) -> Mapping[str, Instance]:
    found: dict[str, Instance] = {}
    for number, row in enumerate(_rows(path)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{path}: row {number} is not an object")
        instance = read_instance(row, f"{path}: row {number}")
        if instance.instance_id in found:
            raise ConfigError(f"{path}: instance_id {instance.instance_id} occurs twice")
        found[instance.instance_id] = instance
    if not found:
        raise ConfigError(f"{path} holds no instance")
    return found


def _rows(path: Path) -> Iterable[Any]:
    if path.suffix not in (".json", ".jsonl", ".parquet"):
        raise ConfigError(f"env.instances: {path} must end in .json, .jsonl or .parquet")
    content = read_rows(path, "env.instances")
    if isinstance(content, Mapping):
        return [content] if "instance_id" in content else list(content.values())
    return content if isinstance(content, list | ParquetRows) else [content]
