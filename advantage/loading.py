"""Imports a function that a key of the YAML names, as `file.py:function`, `package.module:function`
or with dots."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_verlog import ConfigError


@functools.cache
def load_function(path: str, key: str) -> Callable[..., Any]:
    """Return the function at `path`; raises ConfigError, with `key`, if it is not there or its
    module fails."""
    module_path, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        module = (
            _load_file(Path(module_path))
            if module_path.endswith(".py")
            else importlib.import_module(module_path)
        )
    except Exception as error:
        raise ConfigError(
            f"{key}: {module_path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_path} has no function {name}")
    return function


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
