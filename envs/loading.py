"""Imports environment modules, functions and optional packages, and explains why an import failed.

The path of an environment is a module name (`envs.crafter`) or a `.py` file with a function
`build_env(sample, args)`.
"""

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import reprlib
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from envs.errors import (
    ConfigError,
    EnvironmentFault,
    MissingDependencyError,
    SlimeVerlogError,
    describe,
    did_you_mean,
    place_of,
    place_of_function,
)
from envs.slime_env import SlimeEnv

_KEY = "rollout_interaction_env_path"
_loading = threading.Lock()
_loops = threading.local()
"""The event loop of each thread in which async environments play."""
try:
    _STARTED_IN = Path.cwd()
except FileNotFoundError:  # it was deleted
    _STARTED_IN = Path()
_edited: dict[str, int] = {}
"""Modification time in ns of each imported file, by its module name."""


def load_env_module(path: str) -> ModuleType:
    """Import the environment module at `path`; raises as `load_module`, and ConfigError without
    `build_env`."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{_KEY} must be a module name or a .py file, got {path!r}")
    module = load_module(path, _KEY)
    if not callable(getattr(module, "build_env", None)):
        functions = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches("build_env", functions, n=1)
        hint = (
            f"rename {near[0]}"
            if near
            else "add one that returns the environment of sample.metadata['task']"
        )
        raise ConfigError(f"{_KEY}: {path} has no function build_env(sample, args); {hint}")
    return module


def build_env_from(path: str, metadata: Mapping[str, Any], args: Any = None) -> Any:
    """Build an environment outside of a rollout; `args` may be an `env:` mapping. Raises as
    `call_build_env`."""
    if args is None or isinstance(args, Mapping):
        args = SimpleNamespace(env=dict(args or {}))
    return call_build_env(path, SimpleNamespace(metadata=dict(metadata)), args)


def call_build_env(path: str, sample: Any, args: Any) -> Any:
    """Call the module's `build_env`; raises ConfigError if it takes other arguments or returns no
    environment."""
    build_env = load_env_module(path).build_env
    check_arguments(build_env, "build_env(sample, args)", sample, args)
    env = finish(build_env(sample, args))
    lacking = [
        name for name in ("reset", "step", "close") if not callable(getattr(env, name, None))
    ]
    # slime's interface has no more than these three methods.
    is_slimes = not hasattr(env, "instruction_prompt")
    if lacking and not (is_slimes and lacking == ["close"]):
        raise ConfigError(
            f"{path}: build_env returned {reprlib.repr(env)}, which lacks {', '.join(lacking)}; "
            "return an instance of a subclass of envs.base.BaseInteractionEnv"
        )
    check_arguments(env.reset, "reset(self)")
    check_arguments(env.step, "step(self, response_text)", "")
    for name in ("reset", "step", "close"):
        method = getattr(env, name, None)
        if inspect.iscoroutinefunction(method):
            setattr(env, name, lambda *arguments, method=method: finish(method(*arguments)))
    return SlimeEnv(env, sample) if is_slimes else env


def finish(answer: Any) -> Any:
    """Return the answer of a method that may be async; its coroutine runs on this thread's event
    loop, to its end.

    The loop stays the same between calls, but it runs only during them.
    """
    return thread_loop().run_until_complete(answer) if inspect.iscoroutine(answer) else answer


def thread_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this thread's async environments."""
    if not hasattr(_loops, "loop"):
        _loops.loop = asyncio.new_event_loop()
    return _loops.loop


def checked_text(said: Any, script: Any) -> str:
    """Return what `expert_action` or `explain_action` said; raises EnvironmentFault, with its
    place, unless text."""
    if isinstance(said, str):
        return said
    name = getattr(script, "__name__", "the script")
    place = f" ({place_of_function(script)})"
    raise EnvironmentFault(f"`{name}` returned {reprlib.repr(said)}; return text{place}")


def check_arguments(function: Any, form: str, *arguments: Any) -> None:
    """Raise ConfigError, with the function's place, unless it can be called as `form` says."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{place_of_function(function)}: {form.partition('(')[0]} cannot be called as {form}: "
            f"{error}; write def {form}:"
        ) from error


def load_attribute(path: str, key: str) -> Any:
    """Return `package.module.name`, `package.module:name` or `file.py:name`; raises ConfigError,
    with `key`."""
    module_path, _, name = path.rpartition(":" if ":" in path else ".")
    if path.endswith(".py"):
        raise ConfigError(f"{key}: {path} names no function; give {path}:FUNCTION")
    if not module_path or not name:
        raise ConfigError(
            f"{key} must be an import path such as my_package.my_module.my_function, got {path!r}"
        )
    module = load_module(module_path, key)
    try:
        return getattr(module, name)
    except AttributeError as error:
        hint = did_you_mean(name, vars(module), n=1)
        raise ConfigError(f"{key}: {module_path} has no {name}{hint and '; ' + hint}") from error


def load_module(path: str, key: str) -> ModuleType:
    """Import a module or `.py` file, again after an edit; raises ConfigError, with `key`, if that
    fails."""
    try:
        with _loading:
            return (
                _load_file(Path(path), key)
                if path.endswith(".py")
                else importlib.import_module(path)
            )
    except SlimeVerlogError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path.endswith(".py") or not f"{path}.".startswith(f"{missing}."):
            hint = f"{missing}, or correct the import at {place_of(error, path)}"
            if path.startswith("envs."):
                hint = "it with: pip install 'slime-verlog[envs]'"
            lacking = f"{key}: {path} imports {missing}, which is not installed; install {hint}"
            raise MissingDependencyError(lacking) from error
        import envs

        known = [f"envs.{module.name}" for module in pkgutil.iter_modules(envs.__path__)]
        hint = did_you_mean(path, known, "give a module name or a path that ends in .py", n=2)
        raise ConfigError(f"{key}: there is no module {path}; {hint}") from error
    except Exception as error:
        raise ConfigError(
            f"{key}: {path} fails on import: {describe(error, path)}; correct this line"
        ) from error


def split_command(command: str | Sequence[str], key: str) -> list[str]:
    """Return a command as words; a text is split as in a shell. Raises ConfigError, with `key`, if
    it cannot be."""
    try:
        return shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(
            f"{key} cannot be split into words ({error}); write a list instead"
        ) from error


def import_extra(module: str, what: str, extra: str, note: str = "") -> ModuleType:
    """Import a module for `what`; raises MissingDependencyError, with the `pip install` of
    `extra`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{what} needs the package {error.name}; install it with: pip install "
            f"'slime-verlog[{extra}]'{note}"
        ) from error


def _load_file(path: Path, key: str) -> ModuleType:
    """Import a file under a unique module name, so that files with the same name do not replace
    each other."""
    if not path.is_file() and (_STARTED_IN / path).is_file():
        path = _STARTED_IN / path  # an environment has changed the current directory
    if not path.is_file():
        what = "the environment file" if key == _KEY else f"{key}: the file"
        advice = "run the command where the file lies, or give its absolute path"
        raise ConfigError(
            f"{what} {path} does not exist (current directory: {Path.cwd()}); {advice}"
        )
    path = path.resolve()
    name = f"slime_verlog_env_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:10]}"
    edited = path.stat().st_mtime_ns
    if name in sys.modules and _edited.get(name) == edited:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # true of every .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # Not `exec_module`: its cached bytecode hides an edit of the same second that keeps the
        # file's size.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _edited[name] = edited
    return module
