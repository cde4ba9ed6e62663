"""Finds the module that an environment path names, and builds environments from it.

A path is a module name (`envs.crafter`) or a `.py` file; either must offer `build_env(sample, args)`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from envs.errors import ConfigError, MissingDependencyError, SlimeVerlogError

_KEY = "rollout_interaction_env_path"
_loading = threading.Lock()


def load_env_module(path: str) -> ModuleType:
    """Import the environment module at `path`; a file that was edited since is read again.

    Raises:
        ConfigError: there is no such module or file, it fails on import, or it has no `build_env`.
        MissingDependencyError: it imports a package that is not installed.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{_KEY} must be a module name or a .py file, got {path!r}")
    try:
        with _loading:
            module = _import(path)
    except SlimeVerlogError:
        raise
    except ModuleNotFoundError as error:
        raise _explain_missing(path, error) from error
    except Exception as error:
        raise ConfigError(f"{_KEY}: {path} fails on import: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, "build_env", None)):
        raise ConfigError(f"{_KEY}: {path} has no function build_env(sample, args); every environment needs one")
    return module


def build_env_from(path: str, metadata: Mapping[str, Any], args: Any = None) -> Any:
    """Build the environment of one task outside of a rollout.

    `metadata` is the sample's (`task`, `seed`); `args` is what the rollout hands over, or a plain mapping that
    stands for the YAML's `env:`.

    Raises:
        ConfigError: as `load_env_module`, a bad task or option, or `build_env` returned no environment.
    """
    if args is None or isinstance(args, Mapping):
        args = SimpleNamespace(env=dict(args or {}))
    env = load_env_module(path).build_env(SimpleNamespace(metadata=dict(metadata)), args)
    lacking = [name for name in ("reset", "step", "close") if not callable(getattr(env, name, None))]
    if lacking:
        raise ConfigError(f"{path}: build_env returned {env!r}, which lacks {', '.join(lacking)}")
    return env


def load_attribute(path: str, key: str) -> Any:
    """Return what an import path names: `package.module.name`, `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: it does not lead anywhere; `key` is the setting that the message names.
    """
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise ConfigError(f"{key} must be an import path such as my_package.my_module.my_function, got {path!r}")
    module = load_module(module_path, key)
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: {module_path} has no {name}{hint}") from error


def load_module(path: str, key: str) -> ModuleType:
    """Import the module or `.py` file at `path`; a file that was edited since is read again.

    Raises:
        ConfigError: there is no such module or file, or it fails on import; `key` is the setting that is named.
    """
    try:
        with _loading:
            return _import(path)
    except SlimeVerlogError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: cannot import {path}: there is no module {error.name}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {path} fails on import: {type(error).__name__}: {error}") from error


def _import(path: str) -> ModuleType:
    return _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that it can neither shadow nor be shadowed."""
    if not path.is_file():
        raise ConfigError(f"the environment file {path} does not exist (looked from {Path.cwd()})")
    path = path.resolve()
    name = f"slime_verlog_env_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:10]}"
    known, edited = sys.modules.get(name), path.stat().st_mtime_ns
    if known is not None and known.__edited__ == edited:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    module.__edited__ = edited
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _explain_missing(path: str, error: ModuleNotFoundError) -> SlimeVerlogError:
    missing = error.name or ""
    if path.endswith(".py") or not (path == missing or path.startswith(missing + ".")):
        return MissingDependencyError(
            f"{_KEY}: {path} imports {missing}, which is not installed; for the environments that come with "
            "slime-verlog: pip install 'slime-verlog[envs]'"
        )
    import envs

    known = [f"envs.{module.name}" for module in pkgutil.iter_modules(envs.__path__)]
    near = difflib.get_close_matches(path, known, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else "give a module name or a path that ends in .py"
    return ConfigError(f"{_KEY}: there is no module {path}; {hint}")
