"""Fingerprints of an environment's files, which tell the results of one version of it from those of
another."""

import ast
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FRAMEWORK = frozenset({"advantage", "embedded", "envs", "inspection", "rollout", "slime_verlog"})
"""Packages of this project; an environment's own files are counted, those of the interface are
not."""
_FILE_NAME = re.compile(r"[\w./-]{1,100}\.\w+")


def fingerprints(env_paths: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each file that decides what the environments do, by its path from the folder
    of the environment or setting that leads to it.

    These are the environment's file or package, files that `config` names, such as data or
    `tools.py:function`, and what their code imports or names from its own folder, such as other
    modules and prompt templates.
    """
    starts = [_environment(env_path) for env_path in env_paths]
    starts += [_named(text) for text in _texts(config)]
    found: dict[Path, str] = {}
    for start in filter(None, starts):
        folder = start[0].resolve().parent
        waiting = list(start)
        while waiting:
            path = waiting.pop().resolve()
            if path not in found:
                found[path] = os.path.relpath(path, folder)
                waiting += _used_by(path) if path.suffix == ".py" else []
    digests: dict[str, str] = {}
    for path, name in sorted(found.items()):
        # Files of two folders may have the same name.
        content = digests.get(name, "").encode() + path.read_bytes()
        digests[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return digests


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _environment(env_path: str) -> list[Path]:
    """The file, or the module's files; none of a module that cannot be found, which other checks
    report."""
    if env_path.endswith(".py"):
        return [Path(env_path)]
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(env_path)
        if spec is not None and spec.origin:
            return _files(Path(spec.origin))
    return []


def _named(text: str) -> list[Path]:
    """The file that a setting names: a path, `file.py:function`, or a function of a module in this
    folder."""
    path = text.partition(":")[0]
    with suppress(OSError, ValueError, RuntimeError):
        # A text that is no path, such as a long prompt, raises here.
        if (file := Path(path).expanduser()).is_file():
            return [file]
    if not path.replace(".", "").isidentifier():
        return []
    return _module(path, Path.cwd()) or _module(path.rpartition(".")[0], Path.cwd())


def _files(path: Path) -> list[Path]:
    """A module's file; of a package, all its files."""
    if path.name != "__init__.py":
        return [path]
    return [file for file in path.parent.rglob("*") if file.is_file() and file.suffix != ".pyc"]


def _used_by(path: Path) -> Iterator[Path]:
    """Files that a Python file imports, or names, from its folder, one folder below, and its
    package."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    folder = path.parent
    places = [folder, *(place for place in folder.iterdir() if place.is_dir())]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _FILE_NAME.fullmatch(node.value)
        ):
            named = [place / node.value for place in places]
            yield from (file for file in named if file.is_file())
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            yield from _module(name, folder)


def _module(name: str, folder: Path) -> list[Path]:
    """The files of a module in `folder`, or in the package around it, that is not part of the
    interface."""
    places = [folder]
    while (places[-1] / "__init__.py").exists():
        places.append(places[-1].parent)
    is_framework = name.partition(".")[0] in FRAMEWORK
    for place in places if name else ():
        path = place.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and (not is_framework or file.parent == folder):
                return _files(file)
    return []
