"""Takes assertions apart: what the code under test computes, the operator, and what the test
expects.

The observed side is the one that depends more on the package, judged by the syntax tree alone. A
mistake costs a probe, which calibration drops; the verdict stays right.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

Function = ast.FunctionDef | ast.AsyncFunctionDef
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "in": "contains", "not in": "lacks"}
"""Operators when the observed side stands on the right; the others are symmetric."""
NEGATED = {"==": "!=", "<": ">=", "<=": ">", "in": "not in", "is": "is not", "truthy": "falsy"}
NEGATED |= {value: key for key, value in NEGATED.items()}

_UNITTEST = {
    **dict.fromkeys(
        ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual"),
        "==",
    ),
    **dict.fromkeys(("assertSetEqual", "assertSequenceEqual", "assertMultiLineEqual"), "=="),
    "assertNotEqual": "!=",
    "assertLess": "<",
    "assertLessEqual": "<=",
    "assertGreater": ">",
    "assertGreaterEqual": ">=",
    "assertIn": "in",
    "assertNotIn": "not in",
    "assertIs": "is",
    "assertIsNot": "is not",
    "assertAlmostEqual": "nearly",
    "assertCountEqual": "same items",
}
_SINGLETONS = (None, True, False, Ellipsis)
RAISERS = ("raises", "assertRaises", "assertRaisesRegex")


class Origin(IntEnum):
    """How much an expression depends on the package under test."""

    TEST = 0
    """Written in the test."""
    TOUCHED = 1
    """Handed to the package, which may have changed it, or made by a fixture."""
    PACKAGE = 2
    """Computed by the package."""


@dataclass(frozen=True)
class Claim:
    """One comparison; `expected` is None for truths, and `operator` "none" if both sides are the
    package's."""

    operator: str
    observed: ast.expr | list[ast.stmt]
    expected: ast.expr | None = None
    target: ast.expr | None = None
    """Name that receives the exception: `with raises(...) as target`."""

    @property
    def exception(self) -> str:
        """The expected exception as the test names it; it may be imported from elsewhere in another
        solution."""
        first = (
            self.expected.elts[0]
            if self.operator == "raises" and isinstance(self.expected, ast.Tuple)
            else None
        )
        return ast.unparse(first) if first is not None else ""


class Origins:
    """Where the names of a module and of one function come from."""

    def __init__(self, module: ast.Module, packages: Collection[str]) -> None:
        self.packages = packages
        self.in_function = False
        self.names: dict[str, Origin] = {"self": Origin.TOUCHED, "cls": Origin.TOUCHED}
        for _ in range(2):
            for node in module.body:
                self._see(node)

    def inside(self, function: Function) -> Origins:
        """The same with the function's own names."""
        made = copy.copy(self)
        made.names = dict(self.names)
        made.in_function = True
        given = parametrized(function)
        for argument in (
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
        ):
            made.names.setdefault(
                argument.arg, Origin.TEST if argument.arg in given else Origin.TOUCHED
            )
        for _ in range(3):
            for node in ast.walk(function):
                made._see(node)
        return made

    def of(self, node: ast.AST) -> Origin:
        """The strongest origin of the names in an expression."""
        names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        return max((self.names.get(name, Origin.TEST) for name in names), default=Origin.TEST)

    def _see(self, node: ast.AST) -> None:
        """Learn from a statement, or a part of one, what its names come from."""
        match node:
            case ast.If() | ast.Try() if not self.in_function:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._see(child)
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in self.packages:
                        self.names[alias.asname or alias.name.split(".")[0]] = Origin.PACKAGE
            case ast.ImportFrom(level=level, module=module, names=names):
                if level or (module or "").split(".")[0] in self.packages:
                    self.names |= {alias.asname or alias.name: Origin.PACKAGE for alias in names}
            case ast.ClassDef() if self.in_function:
                return
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                self._raise(name, self.of(node))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._raise(target, self.of(value))
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.AugAssign(target=target, value=value)
                | ast.For(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                self._raise(target, self.of(value))
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._raise(target, Origin.PACKAGE if _called(value) in RAISERS else self.of(value))
            case ast.Call(func=function) if self.of(function) is Origin.PACKAGE:
                for argument in (*node.args, *(k.value for k in node.keywords)):
                    inner = argument.value if isinstance(argument, ast.Starred) else argument
                    if isinstance(inner, ast.Name):
                        self._raise(inner, Origin.TOUCHED)

    def _raise(self, target: ast.AST | str, origin: Origin) -> None:
        names = (
            [target]
            if isinstance(target, str)
            else [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
        )
        for name in names:
            self.names[name] = max(origin, self.names.get(name, Origin.TEST))


def parametrized(function: Function) -> Mapping[str, tuple[ast.Call, int]]:
    """Arguments that `pytest.mark.parametrize` fills: the decorator, and the argument's column in
    it."""
    found: dict[str, tuple[ast.Call, int]] = {}
    for call in function.decorator_list:
        if not (isinstance(call, ast.Call) and _called(call) == "parametrize" and call.args):
            continue
        names = call.args[0]
        if isinstance(names, ast.Constant) and isinstance(names.value, str):
            words = [word.strip() for word in names.value.split(",")]
        elif isinstance(names, ast.List | ast.Tuple):
            words = [
                n.value
                for n in names.elts
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
        else:
            continue
        found |= {word: (call, column) for column, word in enumerate(words)}
    return found


def claims_of(statement: ast.stmt, origins: Origins) -> list[Claim] | None:
    """The claims of an assertion; an empty list if nothing in it can be observed, None if it is not
    an assertion."""
    match statement:
        case ast.Assert(test=test):
            return list(_conditions(test, origins))
        case ast.With(
            items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=target)], body=body
        ):
            if _called(call) in RAISERS and (expected := _exception(call)):
                return [Claim("raises", body, expected, target)]
        case ast.Expr(value=ast.Call() as call):
            return _call_claims(call, origins)
    return None


def _call_claims(call: ast.Call, origins: Origins) -> list[Claim] | None:
    name = _called(call)
    if name in RAISERS:
        return list(_raising_call(call))
    match name, call.args:
        case "assertTrue", [test, *_]:
            return list(_conditions(test, origins))
        case "assertFalse", [test, *_]:
            return [_negated(claim) for claim in _conditions(test, origins)]
        case "assertIsNone" | "assertIsNotNone", [value, *_]:
            return [Claim("is" if name == "assertIsNone" else "is not", value, ast.Constant(None))]
        case "assertIsInstance" | "assertNotIsInstance", [_, _, *_]:
            test = ast.Call(ast.Name("isinstance", ast.Load()), call.args[:2], [])
            return [Claim("truthy" if name == "assertIsInstance" else "falsy", test)]
        case _, [first, second, *_] if name in _UNITTEST:
            return list(_pair(first, _UNITTEST[name], second, origins))
    return [] if name.startswith("assert") and isinstance(call.func, ast.Attribute) else None


def _conditions(test: ast.expr, origins: Origins) -> Iterator[Claim]:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            claims = list(_conditions(operand, origins))
            if len(claims) == 1 and claims[0].operator in NEGATED:
                yield _negated(claims[0])
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _conditions(value, origins)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            for first, operator, second in zip([left, *rights], ops, rights, strict=False):
                # `written` is a text such as "a == b".
                written = ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))
                yield from _pair(first, written[2:-2], second, origins)
        case ast.Call() if _called(test) in RAISERS and test.args:
            yield from _raising_call(test)
        case _ if origins.of(test) > Origin.TEST:
            yield Claim("truthy", test)


def _pair(left: ast.expr, operator: str, right: ast.expr, origins: Origins) -> Iterator[Claim]:
    sides = origins.of(left), origins.of(right)
    if max(sides) is Origin.TEST:
        return
    if min(sides) is Origin.PACKAGE:
        # `f.__doc__ == g.__doc__` may hold with other texts than the reference's.
        yield Claim("none", ast.Tuple([left, right], ast.Load()))
        return
    mirrored = sides[1] > sides[0]
    observed, expected = (right, left) if mirrored else (left, right)
    operator = MIRRORED.get(operator, operator) if mirrored else operator
    singleton = isinstance(expected, ast.Constant) and any(
        expected.value is one for one in _SINGLETONS
    )
    if operator in ("is", "is not") and not singleton:
        # Identity cannot be told from outside.
        yield Claim(
            "truthy" if operator == "is" else "falsy", ast.Compare(observed, [ast.Is()], [expected])
        )
    else:
        yield Claim(operator, observed, expected)


def _raising_call(call: ast.Call) -> Iterator[Claim]:
    """`raises(Error, function, *arguments)`, of pytest, unittest or a helper of the package."""
    extra = 2 if _called(call) == "assertRaisesRegex" else 1
    if len(call.args) <= extra or not (expected := _exception(call)):
        return
    function = call.args[extra]
    if isinstance(function, ast.Lambda) and not function.args.args:
        observed = function.body
    else:
        observed = ast.Call(function, call.args[extra + 1 :], call.keywords)
    yield Claim("raises", observed, expected)


def _exception(call: ast.Call) -> ast.expr | None:
    """A pair: the type, or the types, and the pattern for the message, or None."""
    patterns: list[ast.expr] = [k.value for k in call.keywords if k.arg == "match"]
    patterns += call.args[1:2] if _called(call) == "assertRaisesRegex" else []
    return (
        ast.Tuple([call.args[0], (*patterns, ast.Constant(None))[0]], ast.Load())
        if call.args
        else None
    )


def _negated(claim: Claim) -> Claim:
    return Claim(NEGATED.get(claim.operator, claim.operator), claim.observed, claim.expected)


def _called(node: ast.AST) -> str:
    """Name of the function that a call calls, without what stands before its last dot."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
