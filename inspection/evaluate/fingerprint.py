"""Fingerprints of an environment's files, which tell the results of one version of it from those of another."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FRAMEWORK = frozenset({"advantage", "embedded", "envs", "inspection", "rollout", "slime_verlog"})
"""Packages of this project; an environment's own files are counted, those of the interface are not."""


def fingerprints(env_paths: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each file that decides what the environments do, by `folder/name`.

    These are the environment's file or package, files that `config` names, such as data or `tools.py:function`, and
    what their code imports or names from its own folder, such as other modules and prompt templates.
    """
    waiting = [path for env_path in env_paths for path in _environment(env_path)]
    waiting += [path for text in _texts(config) for path in _named(text)]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        if path not in found:
            found.add(path)
            waiting += _used_by(path) if path.suffix == ".py" else []
    digests: dict[str, str] = {}
    for path in sorted(found):
        name = f"{path.parent.name}/{path.name}"
        content = digests.get(name, "").encode() + path.read_bytes()  # two folders may have the same name
        digests[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return digests


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        yield from _texts(one)


def _environment(env_path: str) -> list[Path]:
    """The file, or the module's files; none of a module that cannot be found, which other checks report."""
    if env_path.endswith(".py"):
        return [Path(env_path)]
    try:
        spec = importlib.util.find_spec(env_path)
    except (ImportError, ValueError):
        return []
    return _package(Path(spec.origin)) if spec is not None and spec.origin else []


def _named(text: str) -> list[Path]:
    """The file that a setting names: a path, `file.py:function`, or a function of a module in this folder."""
    path, _, _ = text.partition(":")
    try:
        if (file := Path(path).expanduser()).is_file():
            return [file]
    except (OSError, ValueError, RuntimeError):  # a text that is no path, such as a long prompt
        return []
    if not all(part.isidentifier() for part in path.split(".")):
        return []
    modules = [path, path.rpartition(".")[0]]
    return [file for name in modules if (file := _own_module(name, Path.cwd())) is not None]


def _package(path: Path) -> list[Path]:
    """A module's file, and all files of a package."""
    if path.name != "__init__.py":
        return [path]
    files = [file for file in path.parent.rglob("*") if file.is_file()]
    return [file for file in files if file.suffix != ".pyc"]


def _used_by(path: Path) -> Iterator[Path]:
    """Files that a Python file imports or names: those in its folder, one folder below, and in its package."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    folder = path.parent
    places = [folder, *(place for place in folder.iterdir() if place.is_dir())]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 100:
            named = [place / node.value for place in places] if Path(node.value).suffix else []
            yield from (file for file in named if "\0" not in node.value and file.is_file())
        for name in _imports(node):
            module = _own_module(name, folder)
            yield from _package(module) if module is not None else []


def _imports(node: ast.AST) -> list[str]:
    """The modules that a statement may import; a relative one without its dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        return [*([node.module] if node.module else []), *(base + alias.name for alias in node.names)]
    return []


def _own_module(name: str, folder: Path) -> Path | None:
    """The file of a module in or below `folder`, or in the package around it, that is not part of the interface."""
    places = [folder]
    while (places[-1] / "__init__.py").exists():
        places.append(places[-1].parent)
    is_framework = name.partition(".")[0] in FRAMEWORK
    for place in places:
        path = place.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if name and file.is_file() and (not is_framework or file.parent == folder):
                return file
    return None
