"""Rewrites a test without changing its meaning: local names, harmless statements, the order of definitions.

Unchanged are the file's name, the test's name, its arguments and decorators, and the order of what it does. Code that
recognises a test by its text, bytecode or constants therefore does not recognise it here.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterator

from envs.swe.verdict.definitions import Function, Modules, named_functions

_WORDS = ("data", "found", "given", "item", "left", "made", "part", "piece", "row", "seen", "step", "value", "wanted")
_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_LOOKS_AT_ITSELF = frozenset(("locals", "vars", "dir", "eval", "exec", "globals", "compile"))


def rewrite(function: Function, taken: Collection[str], rng: random.Random) -> None:
    """Rewrite the body of a function in place; `taken` are names that may not become local variables.

    A function that looks at its own variables, through `locals` or `exec`, stays as it is.
    """
    if any(isinstance(n, ast.Name) and n.id in _LOOKS_AT_ITSELF for n in ast.walk(function)):
        return
    fresh = _fresh_names(set(taken), rng)
    renamed = {name: next(fresh) for name in _renamable(function) if rng.random() < 0.8}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in renamed:
            node.id = renamed[node.id]
    _name_constants(function, fresh, rng)
    start = int(ast.get_docstring(function) is not None)
    for _ in range(rng.randint(1, 3)):
        function.body.insert(rng.randint(start, len(function.body)), _harmless(function, next(fresh), rng))


def names_in(module: ast.Module) -> frozenset[str]:
    """Every name that the module mentions in any way."""
    found: set[str] = set()
    for node in ast.walk(module):
        found.update(str(value) for _, value in ast.iter_fields(node) if isinstance(value, str))
    return frozenset(found)


def _fresh_names(taken: set[str], rng: random.Random) -> Iterator[str]:
    while True:
        name = rng.choice(_WORDS) + rng.choice(("", f"_{rng.choice(_WORDS)}", str(rng.randrange(10))))
        if name not in taken:
            taken.add(name)
            yield name


def _renamable(function: Function) -> list[str]:
    """Local variables that nothing but plain names refers to, and that no inner scope has a name for."""
    own, inner = set(), set()
    waiting: list[tuple[ast.AST, bool]] = [(statement, False) for statement in function.body]
    while waiting:
        node, nested = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            (inner if nested else own).add(node.id)
        nested = nested or isinstance(node, _SCOPES)
        waiting += [(child, nested) for child in ast.iter_child_nodes(node)]
    bound = own - inner
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            bound -= set(node.names)
        elif isinstance(node, ast.ClassDef):
            # A variable that a class body sets is an attribute.
            bound -= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {node.name}
        elif isinstance(node, ast.arg | ast.keyword):
            bound.discard(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler):
            bound.discard(node.name or "")
        elif isinstance(node, ast.alias):
            bound.discard((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar):
            bound.discard(node.name or "")
        elif isinstance(node, ast.MatchMapping):
            bound.discard(node.rest or "")
    return sorted(bound)


def _name_constants(function: Function, fresh: Iterator[str], rng: random.Random) -> None:
    """Give some constants in comparisons a variable, set in the statement before."""
    body: list[ast.stmt] = []
    for statement in function.body:
        test = statement.test if isinstance(statement, ast.Assert) else None
        if isinstance(test, ast.Compare) and isinstance(test.comparators[-1], ast.Constant) and rng.random() < 0.4:
            name = next(fresh)
            body.append(_assignment(name, test.comparators[-1]))
            test.comparators[-1] = ast.Name(name, ast.Load())
        body.append(statement)
    function.body = body


def _harmless(function: Function, name: str, rng: random.Random) -> ast.stmt:
    constants = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and type(n.value) in (int, str)]
    value = rng.choice([*constants, rng.randrange(100)])
    plain = _assignment(name, ast.Constant(value))
    if rng.random() < 0.5:
        return plain
    return ast.If(ast.Constant(True), [plain], [])


def _assignment(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def shuffle_definitions(modules: Modules, functions: Collection[str], rng: random.Random) -> None:
    """Let tests of one module or class change places, where nothing depends on their order."""
    wanted = {id(node) for name, node in named_functions(modules).items() if name in functions}
    for module in modules.values():
        used = {n.id for n in ast.walk(module) if isinstance(n, ast.Name)}
        for scope in ast.walk(module):
            if isinstance(scope, ast.Module | ast.ClassDef):
                _shuffle_body(scope.body, wanted, used, rng)


def _shuffle_body(body: list[ast.stmt], wanted: set[int], used: set[str], rng: random.Random) -> None:
    defined = [getattr(node, "name", "") for node in body]
    places = [
        index
        for index, node in enumerate(body)
        if isinstance(node, Function)
        and id(node) in wanted
        and not (node.decorator_list or node.args.defaults or node.args.kw_defaults or node.args.kwonlyargs)
        and node.name not in used
        and defined.count(node.name) == 1
    ]
    moved = [body[index] for index in places]
    rng.shuffle(moved)
    for index, node in zip(places, moved, strict=True):
        body[index] = node
