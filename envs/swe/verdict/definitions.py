"""Where the tests named by pytest's node ids are defined, as syntax trees.

Tests inherited from a class in the same folder, or in a folder above, are found there. Tests that come from elsewhere
(imported, or made by a decorator or a loop) are not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

Function = ast.FunctionDef | ast.AsyncFunctionDef
Modules = Mapping[str, ast.Module]


def parse_tests(tree: Path, ids: Iterable[str]) -> Modules:
    """Parse the test files of `ids` and the files beside and above them (not those in the repository's root)."""
    files = {i.split("::", 1)[0] for i in ids}
    folders = {folder for file in files for folder in PurePosixPath(file).parents if folder.parts}
    beside = {p.relative_to(tree).as_posix() for folder in folders for p in (tree / folder).glob("*.py")}
    return parse_files(tree, files | beside)


def parse_files(tree: Path, paths: Iterable[str]) -> Modules:
    """Parse files below `tree`; what is missing or not Python is left out."""
    modules = {}
    for path in sorted(paths):
        try:
            modules[path] = ast.parse((tree / path).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
    return modules


def named_functions(modules: Modules) -> Mapping[str, Function]:
    """Every function of the modules by a name that stays the same as long as the file does: `path:line`."""
    return {
        f"{path}:{node.lineno}": node
        for path, module in modules.items()
        for node in ast.walk(module)
        if isinstance(node, Function)
    }


def definitions(modules: Modules, ids: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The tests that each function defines, by the function's name as `named_functions` gives it."""
    names = {id(node): name for name, node in named_functions(modules).items()}
    found: dict[str, list[str]] = {}
    for node_id in ids:
        for function in _find(modules, node_id):
            found.setdefault(names[id(function)], []).append(node_id)
    return {name: tuple(tests) for name, tests in found.items()}


def _find(modules: Modules, node_id: str) -> list[Function]:
    """Definitions of a test; several where a name is defined in several branches."""
    path, *names = node_id.split("[", 1)[0].split("::")
    if path not in modules or not names:
        return []
    scope: list[ast.AST] = [modules[path]]
    for name in names[:-1]:
        scope = [c for s in scope for c in _members(s) if isinstance(c, ast.ClassDef) and c.name == name]
    return _methods(modules, scope, names[-1], set())


def _methods(modules: Modules, scope: list[ast.AST], name: str, seen: set[str]) -> list[Function]:
    """Functions `name` in `scope`, or else in the base classes, which are found by their names."""
    found = [f for s in scope for f in _members(s) if isinstance(f, Function) and f.name == name]
    bases = {_last_name(base) for s in scope if isinstance(s, ast.ClassDef) for base in s.bases} - seen
    if found or not bases:
        return found
    parents: list[ast.AST] = [
        c for m in modules.values() for c in _members(m) if isinstance(c, ast.ClassDef) and c.name in bases
    ]
    return _methods(modules, parents, name, seen | bases)


def _last_name(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _members(scope: ast.AST) -> Iterator[ast.AST]:
    """Functions and classes of a module or class, also below `if`, `try` and the like."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, Function | ast.ClassDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _members(child)
