"""Removes from probe files what only fed expected sides: a backward slice from the probes.

What the package computed or may have changed stays, so that the probes see the same state as the
tests.
"""

import ast
from collections.abc import Collection, Mapping
from pathlib import Path

from envs.swe.verdict.claims import Function, Origin, Origins, parametrized

_CALLED = ("test", "pytest", "setup", "teardown", "__")


def slice_tests(
    modules: Mapping[str, ast.Module],
    functions: list[tuple[Function, Origins]],
    packages: Collection[str],
) -> None:
    """Remove what only fed expected sides: assignments, helpers, columns of loop tables and of
    parameters."""
    whole = {path: Origins(module, packages) for path, module in modules.items()}
    gone: set[str] = set()
    while True:
        names = frozenset[str]().union(*map(_loaded, modules.values()))
        nodes = (node for module in modules.values() for node in ast.walk(module))
        attributes = {
            n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
        }
        read = names | attributes
        unused: list[ast.AST] = []
        for function, origins in functions:
            loaded = _loaded(function)
            unused += [
                node for node in ast.walk(function) if _is_unused(node, origins, loaded, attributes)
            ]
        for path, module in modules.items():
            origins = whole[path]
            classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
            unused += [
                n
                for scope in classes
                for n in scope.body
                if _is_unused(n, origins, read, attributes)
            ]
            for node in module.body:
                # pytest calls some functions by their name or their decorator.
                called = isinstance(node, Function) and (
                    node.decorator_list or node.name.startswith(_CALLED)
                )
                if isinstance(node, Function) and not called and node.name not in read:
                    unused.append(node)
                    gone.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign) and _is_unused(
                    node, origins, read, attributes
                ):
                    unused.append(node)
                    gone |= {target.id for target in _targets(node) if isinstance(target, ast.Name)}
        if not unused:
            break
        for module in modules.values():
            _Remover(unused).visit(module)
    stems = {Path(path).stem for path in modules}
    for node in (node for module in modules.values() for node in ast.walk(module)):
        # What was removed from another module of the tests is not imported; the import itself
        # stays.
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in stems:
            node.names = [a for a in node.names if a.name not in gone] or [
                ast.alias("__name__", "_")
            ]
    for function, _ in functions:
        _blank_columns(function)


def _is_unused(
    node: ast.AST, origins: Origins, names: Collection[str], attributes: Collection[str]
) -> bool:
    """Whether a statement stores a value that the package had no part in, and that nothing
    reads."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    if any(
        isinstance(n, ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr)
        for n in ast.walk(node.value)
    ):
        return False
    if not all(
        (isinstance(t, ast.Name) and t.id not in names and not t.id.startswith(("__", "pytest")))
        or (
            isinstance(t, ast.Attribute)
            and isinstance(t.value, ast.Name)
            and t.attr not in attributes
        )
        for t in _targets(node)
    ):
        return False
    origin = origins.of(node.value)
    calls = any(isinstance(n, ast.Call) for n in ast.walk(node.value))
    return (origin is Origin.TEST and (not calls or origins.in_function)) or (
        origin is Origin.TOUCHED and not calls
    )


def _blank_columns(function: Function) -> None:
    loaded = _loaded(function)
    for node in ast.walk(function):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            names = [t.id if isinstance(t, ast.Name) else "" for t in node.target.elts]
            for column, name in enumerate(names):
                if name and name not in loaded:
                    _blank_column(node.iter, column, len(names))
    given = parametrized(function)
    for name, (call, column) in given.items():
        indirect = any(keyword.arg == "indirect" for keyword in call.keywords)
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "ids"]
        if name not in loaded and not indirect and len(call.args) > 1:
            _blank_column(call.args[1], column, sum(one is call for one, _ in given.values()))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _loaded(node: ast.AST) -> frozenset[str]:
    """Names that are read below a node, or belong to an outer function."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            names.add(inner.id)
        elif isinstance(inner, ast.Nonlocal | ast.Global):
            names.update(inner.names)
        elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
            names.add(inner.target.id)
    return frozenset(names)


def _blank_column(table: ast.expr, column: int, width: int) -> None:
    """Write 0 into one column of a literal table."""
    if not isinstance(table, ast.List | ast.Tuple):
        return
    for index, row in enumerate(table.elts):
        if (
            isinstance(row, ast.Call)
            and isinstance(row.func, ast.Attribute)
            and row.func.attr == "param"
        ):
            row.keywords = [keyword for keyword in row.keywords if keyword.arg != "id"]
            if column < len(row.args):
                row.args[column] = ast.Constant(0)
        elif width == 1:
            table.elts[index] = ast.Constant(0)
        elif isinstance(row, ast.List | ast.Tuple) and column < len(row.elts):
            row.elts[column] = ast.Constant(0)


class _Remover(ast.NodeTransformer):
    def __init__(self, unwanted: list[ast.AST]) -> None:
        self.unwanted = {id(node) for node in unwanted}

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.Pass() if id(node) in self.unwanted else super().visit(node)
