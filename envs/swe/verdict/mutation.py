"""Wrong versions of a test: one expected value, exception or comparison is changed in its syntax tree.

A change is drawn from a seed, so the same function and seed always give the same change. `Change.apply` writes either
side of it: the mutant, or the original with the same surroundings. Both sides use the same spelling and mention the
same constants, so that only their meaning tells them apart.
"""

from __future__ import annotations

import ast
import builtins
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envs.swe.verdict.definitions import Function

KINDS = ("value", "operator", "planted")
"""`value` changes a constant, a container or an exception; `operator` a comparison; `planted` adds a statement, for
tests in which nothing else can be changed."""

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_EXCEPTIONS = ("KeyError", "ValueError", "TypeError", "IndexError", "ZeroDivisionError", "RuntimeError", "OSError")
_ASSERT_PAIRS = (
    ("assertEqual", "assertNotEqual"),
    ("assertTrue", "assertFalse"),
    ("assertIn", "assertNotIn"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertAlmostEqual", "assertNotAlmostEqual"),
    ("assertLess", "assertGreaterEqual"),
    ("assertGreater", "assertLessEqual"),
)
_EQUALITIES = frozenset(
    ("assertEqual", "assertIs", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertAlmostEqual")
)
_CONSTRUCTORS = frozenset(("list", "tuple", "set", "frozenset", "dict", "sorted", "iter", "approx"))
"""Calls that pass on what they are given, so that their arguments are expected where they are."""
_FIELDS: dict[type[ast.AST], str] = {ast.Assert: "test", ast.Call: "func"}
"""Places where operators change: the condition of an assertion, and the name of unittest's."""
_OPPOSITE = dict(_ASSERT_PAIRS) | {right: left for left, right in _ASSERT_PAIRS}


@dataclass(frozen=True)
class Slot:
    """A place in a syntax tree that holds an expression."""

    parent: ast.AST
    field: str
    index: int | None

    def get(self) -> ast.expr:
        value = getattr(self.parent, self.field)
        return value if self.index is None else value[self.index]

    def put(self, node: ast.expr) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True)
class Change:
    """One way to make a test wrong: what stands in `slot` now, and what the mutant has there."""

    slot: Slot
    right: ast.expr
    wrong: ast.expr

    def apply(self, mutated: bool, rng: random.Random) -> None:
        """Write the mutant, or the original in the same style."""
        chosen, other = (self.wrong, self.right) if mutated else (self.right, self.wrong)
        if isinstance(self.slot.parent, ast.Assert):
            twice = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), chosen))
            self.slot.put(rng.choice((chosen, twice)))
        elif self.slot.field == "func":
            self.slot.put(chosen)
        else:
            self.slot.put(_disguised(chosen, other, rng))


_LITERALS = ast.Constant | ast.List | ast.Tuple | ast.Set


def draw_change(function: Function, kind: str, seed: int) -> Change | None:
    """The change of this kind that the seed picks; None where the function offers none. The function stays as it is,
    except that `planted` adds the statement that it changes."""
    rng = random.Random(seed)
    if kind == "planted":
        return _planted(function, rng)
    slots = [s for s in _slots(function) if (_wrong_value if kind == "value" else _wrong_operator)(s, [], rng)]
    if not slots:
        return None
    # A solution that reads what is expected and returns it fails `[expected]` as asked, and would stay unnoticed; it
    # passes with another constant. So constants come first.
    slot = rng.choice([s for s in slots if isinstance(s.get(), _LITERALS)] or slots)
    constants = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant)]
    wrong = (_wrong_value if kind == "value" else _wrong_operator)(slot, constants, rng)
    return None if wrong is None else Change(slot, slot.get(), wrong)


def _slots(function: Function) -> Iterator[Slot]:
    """Places that hold what a test expects, never what it puts in.

    A solution that differs from the reference where the test does not look passes the original, so it must fail the
    mutant too. That is certain only if the expected side changes: another input may have another right answer.
    """
    for statement in function.body[ast.get_docstring(function) is not None :]:
        yield from _below(statement, False)


def _below(node: ast.AST, expected: bool) -> Iterator[Slot]:
    if isinstance(node, ast.JoinedStr | ast.Lambda | ast.Match | ast.Raise | ast.arguments):
        return
    for field, value in ast.iter_fields(node):
        inside = _is_expected(node, field, expected)
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.expr) and (inside or _FIELDS.get(type(node)) == field):
                yield Slot(node, field, index if isinstance(value, list) else None)
            if isinstance(child, ast.AST):
                yield from _below(child, inside)


def _is_expected(node: ast.AST, field: str, expected: bool) -> bool:
    """Whether what stands in this field of the node is expected, given whether the node is."""
    if isinstance(node, ast.Assert | ast.ExceptHandler):
        return field in ("test", "type")
    if isinstance(node, ast.Call):
        name = _name(node.func)
        asserts = name in _EQUALITIES or name in ("raises", "approx", "warns") or name.startswith("assertRaises")
        return field == "args" and (asserts or (expected and name in _CONSTRUCTORS))
    if isinstance(node, ast.Compare):
        only = node.ops[0] if len(node.ops) == 1 else None
        exact = isinstance(only, ast.Eq | ast.Is) or (isinstance(only, ast.In) and field == "left")
        return expected and exact
    kept = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp | ast.Starred
    return expected and isinstance(node, kept)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _wrong_value(place: Slot, constants: Sequence[Any], rng: random.Random) -> ast.expr | None:
    node = place.get()
    if _FIELDS.get(type(place.parent)) == place.field:
        return None
    if isinstance(node, ast.Constant):
        return _other_constant(node.value, constants, rng)
    # Only a display that is read, never one that names targets.
    if isinstance(node, ast.Set) or (isinstance(node, ast.List | ast.Tuple) and isinstance(node.ctx, ast.Load)):
        return _other_elements(node, rng)
    if isinstance(place.parent, ast.Compare) or _name(getattr(place.parent, "func", place.parent)) in _EQUALITIES:
        # Nothing that is equal to a value is equal to a list of it.
        return ast.List([copy.deepcopy(node)], ast.Load())
    return _other_exception(place, node, rng)


def _other_constant(value: Any, constants: Sequence[Any], rng: random.Random) -> ast.expr | None:
    options: list[Any] = []
    if isinstance(value, bool):
        options = [not value]
    elif isinstance(value, int):
        near = [c for c in constants if type(c) is int and abs(c) <= max(10, 2 * abs(value))]
        options = [*near, *(value + step for step in (-2, -1, 1, 2) if value + step >= 0 or value < 0)]
    elif isinstance(value, float):
        options = [*(c for c in constants if type(c) is float), value + 1, value - 1, value / 2]
    elif isinstance(value, str):
        options = [*(c for c in constants if type(c) is str and 0 < len(c) < 60), *_near_texts(value, rng)]
    elif isinstance(value, bytes):
        options = [value + b"0", value[1:]]
    elif value is None:
        options = [0, False, ""]
    options = [o for o in options if o != value]
    return ast.Constant(rng.choice(options)) if options else None


def _near_texts(text: str, rng: random.Random) -> list[str]:
    if not text:
        return ["a", "x"]
    at = rng.randrange(len(text))
    return [text[:at] + text[at + 1 :], text[:at] + text[at] + text[at:], text[::-1]]


def _other_elements(node: ast.List | ast.Tuple | ast.Set, rng: random.Random) -> ast.expr:
    items: list[ast.expr] = list(node.elts)
    way = rng.choice(("drop", "repeat", "swap")) if len(items) > 1 else rng.choice(("drop", "repeat"))
    if not items:
        items = [ast.Constant(rng.randrange(3))]
    elif way == "swap" and not isinstance(node, ast.Set):
        first, second = rng.sample(range(len(items)), 2)
        items[first], items[second] = items[second], items[first]
    elif way == "repeat" and not isinstance(node, ast.Set):
        items.insert(rng.randrange(len(items)), rng.choice(items))
    elif len(items) > 1 or not isinstance(node, ast.Set):
        del items[rng.randrange(len(items))]
    else:
        items.append(ast.Constant(rng.randrange(100)))
    made = copy.deepcopy(node)
    made.elts = copy.deepcopy(items)
    return made


def _other_exception(place: Slot, node: ast.expr, rng: random.Random) -> ast.expr | None:
    """Another exception where one is expected: as an argument of an assertion, or in `except`."""
    known = getattr(builtins, _name(node), None)
    parent = place.parent
    first_of_raises = (
        isinstance(parent, ast.Call)
        and place.index == 0
        and place.field == "args"
        and _name(parent.func) in ("raises", "assertRaises", "assertRaisesRegex")
    )
    is_exception = isinstance(node, ast.Name) and isinstance(known, type) and issubclass(known, BaseException)
    if isinstance(node, ast.Tuple) or not (first_of_raises or is_exception):
        return None
    related = known if isinstance(known, type) else type(None)
    others = [getattr(builtins, name) for name in _EXCEPTIONS]
    names = [e.__name__ for e in others if not issubclass(e, related) and not issubclass(related, e)]
    return ast.Name(rng.choice(names), ast.Load()) if names else None


def _wrong_operator(place: Slot, _constants: Sequence[Any], rng: random.Random) -> ast.expr | None:
    node, parent = place.get(), place.parent
    if isinstance(parent, ast.Assert) and place.field == "test":
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return node.operand
        flipped = _FLIPPED.get(type(node.ops[0])) if isinstance(node, ast.Compare) and len(node.ops) == 1 else None
        if flipped is None or rng.random() < 0.5:
            return ast.UnaryOp(ast.Not(), node)
        assert isinstance(node, ast.Compare)
        return ast.Compare(node.left, [flipped()], node.comparators)
    if isinstance(node, ast.Attribute) and place.field == "func" and node.attr in _OPPOSITE:
        return ast.Attribute(node.value, _OPPOSITE[node.attr], ast.Load())
    return None


def _planted(function: Function, rng: random.Random) -> Change:
    """A statement of ours: true in the original, false in the mutant."""
    right, wrong = rng.sample(range(2, 60), 2)
    compared = ast.Compare(ast.Constant(right), [ast.Eq()], [ast.Constant(right)])
    start = int(ast.get_docstring(function) is not None)
    function.body.insert(rng.randint(start, len(function.body)), ast.Assert(compared))
    return Change(Slot(compared, "comparators", 0), ast.Constant(right), ast.Constant(wrong))


def _disguised(chosen: ast.expr, other: ast.expr, rng: random.Random) -> ast.expr:
    """`chosen`, looked up in a dict that mentions `other` too where that does no harm.

    The test hardly ever mentions the keys itself, so its last constant is a key. Code that returns the last constant of
    its caller therefore fails originals, and is found out.
    """
    key, other_key = rng.sample([n / 1000 for n in range(1, 1000)], 2)
    pairs = [(key, chosen)]
    if _is_literal(chosen) and _is_literal(other):
        pairs.insert(rng.randrange(2), (other_key, other))
    table = ast.Dict([ast.Constant(key) for key, _ in pairs], [value for _, value in pairs])
    return ast.Subscript(table, ast.Constant(key), ast.Load())


def _is_literal(node: ast.expr) -> bool:
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop)
    return all(isinstance(n, allowed) for n in ast.walk(node)) and not any(
        isinstance(n, ast.Not) for n in ast.walk(node)
    )
