"""The control run's tests: the same files and names, each body failing at its first statement.

A test that passes here did not run its body: something answered in its place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

_FAILURE = ast.parse("raise AssertionError('control')").body
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Modules = dict[str, ast.Module]


def sabotage(tree: Path, ids: Iterable[str]) -> frozenset[str]:
    """Rewrite the test files of `ids` below `tree`; return those ids whose bodies were found.

    Tests inherited from a class beside them are followed there. Those that come from elsewhere (imported, or made
    by a decorator or a loop) are left as they are.
    """
    wanted = tuple(ids)
    modules = dict(_parse(tree, {i.split("::", 1)[0] for i in wanted}))
    reached, bodies = set(), {}
    for node_id in wanted:
        found = _find(modules, node_id)
        bodies.update((id(function), function) for function in found)
        if found:
            reached.add(node_id)
    for function in bodies.values():
        function.body = [*_FAILURE, *function.body]
    changed = {path: m for path, m in modules.items() if any(id(node) in bodies for node in ast.walk(m))}
    for path, module in changed.items():
        (tree / path).write_text(ast.unparse(ast.fix_missing_locations(module)), encoding="utf-8")
    return frozenset(reached)


def _parse(tree: Path, files: set[str]) -> Iterator[tuple[str, ast.Module]]:
    """The test files, and what stands in their folders and the folders above (not in the repository's root)."""
    folders = {folder for file in files for folder in PurePosixPath(file).parents if folder.parts}
    beside = {p.relative_to(tree).as_posix() for folder in folders for p in (tree / folder).glob("*.py")}
    for path in sorted(files | beside):
        try:
            yield path, ast.parse((tree / path).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue


def _find(modules: _Modules, node_id: str) -> list[_Function]:
    """Definitions of a test; several where a name is defined in several branches."""
    path, *names = node_id.split("[", 1)[0].split("::")
    if path not in modules or not names:
        return []
    scope: list[ast.AST] = [modules[path]]
    for name in names[:-1]:
        scope = [c for s in scope for c in _members(s) if isinstance(c, ast.ClassDef) and c.name == name]
    return _methods(modules, scope, names[-1], set())


def _methods(modules: _Modules, scope: list[ast.AST], name: str, seen: set[str]) -> list[_Function]:
    """Functions `name` in `scope`, or else in the base classes, which are found by their names."""
    found = [f for s in scope for f in _members(s) if isinstance(f, _Function) and f.name == name]
    bases = {_last_name(base) for s in scope if isinstance(s, ast.ClassDef) for base in s.bases} - seen
    if found or not bases:
        return found
    parents = [c for m in modules.values() for c in _members(m) if isinstance(c, ast.ClassDef) and c.name in bases]
    return _methods(modules, parents, name, seen | bases)


def _last_name(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _members(scope: ast.AST) -> Iterator[ast.AST]:
    """Functions and classes of a module or class, also below `if`, `try` and the like."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _Function | ast.ClassDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _members(child)
