"""Tasks in SWE-Gym's format, read from JSON, JSON lines or parquet."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.errors import ConfigError, MissingDependencyError
from envs.swe.verdict.trees import DRAW, Instance

_TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def read_instance(row: Mapping[str, Any], where: str = "instance") -> Instance:
    """Build an instance from one row; columns that it does not know are left aside.

    Raises:
        ConfigError: a column is missing or of the wrong type, or no test would have to turn green.
    """
    name = row.get("instance_id")
    where = f"{where} ({name})" if isinstance(name, str) else where
    texts = {key: row.get(key) for key in _TEXTS}
    texts |= {key: "" for key in ("patch", "test_patch") if texts[key] is None}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} must be text, got {value!r}")
    fail_to_pass, pass_to_pass = (_read_tests(row.get(key), f"{where}: {key}") for key in _TESTS)
    if not fail_to_pass:
        raise ConfigError(f"{where}: FAIL_TO_PASS is empty, so nothing could be solved")
    draw = row.get(DRAW, True)
    if not isinstance(draw, bool):
        raise ConfigError(f"{where}: {DRAW} must be true or false, got {draw!r}")
    return Instance(**texts, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass, draw_arguments=draw)


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
    """Read all instances of a file, by id. The file is read once per version of it.

    Raises:
        ConfigError: missing file, unknown ending, damaged content, or an id that occurs twice.
        MissingDependencyError: parquet without pyarrow.
    """
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
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "reading .parquet needs pyarrow; install it with: pip install pyarrow"
            ) from error
        present = set(pyarrow.parquet.read_schema(path).names)
        columns = [*_TEXTS, *_TESTS, *({DRAW} & present)]
        return pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    if path.suffix not in (".json", ".jsonl"):
        raise ConfigError(f"env.instances: {path} must end in .json, .jsonl or .parquet")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if isinstance(content, Mapping):
        return [content] if "instance_id" in content else list(content.values())
    return content if isinstance(content, list) else [content]
