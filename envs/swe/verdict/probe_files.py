"""Turns test files into probe files: copies of the tests without anything that they expect.

    assert names(["bo", "al"]) == ["al", "bo"]     ->    probe(7, lambda: names(["bo", "al"]))
    with pytest.raises(ValueError): parse("")      ->    probe(8, lambda: parse(""))

For the reference solution alone there is a second version, in which a probe also computes what is
expected.
"""

import ast
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from envs.swe.verdict.claims import Claim, Function, Origins, claims_of
from envs.swe.verdict.slicing import slice_tests

TRUTHS = ("truthy", "falsy", "contains", "lacks")
_UNFIT = (
    ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Return | ast.Nonlocal | ast.Global
)


@dataclass(frozen=True)
class Probe:
    """One claim of an assertion; `operator` is "none" if it cannot be compared outside."""

    operator: str
    exception: str = ""
    """Source of the expected exception."""
    compares: bool = False
    """Whether the probe itself compares something, so that what it reports is easily guessed."""


_MAX_DRAWN_TEXT = 20
_Rewritten = tuple[Function, Origins]
"""A test function or helper, and where its names come from."""


@dataclass(frozen=True)
class ProbeFiles:
    """The probe files of one tree, by path, with their probes and the new names of the tests."""

    texts: Mapping[str, str]
    probes: Mapping[int, Probe]
    names: Mapping[str, str]

    def renamed(self, test: str) -> str:
        """A test's node id, without its parameters, by its new names."""
        path, *names = test.split("[", 1)[0].split("::")
        return "::".join((path, *(self.names.get(name, name) for name in names)))


def top_level_names(tree: Path) -> frozenset[str]:
    """Names by which modules and packages of a repository are imported."""
    return frozenset(
        p.stem for root in (tree, tree / "src") if root.is_dir() for p in root.iterdir()
    )


def probe_files(
    tree: Path,
    is_test: Callable[[str], bool],
    packages: frozenset[str],
    draw: int = 0,
    with_expected: bool = False,
) -> ProbeFiles:
    """The probe files for the tests below `tree` and their helpers; those that are not Python come
    out empty.

    They depend on the test files and on `packages`, the names of what is tested, alone. With a
    `draw` other than 0, literals of the tests are drawn anew; `with_expected` gives the reference's
    version.
    """
    paths = [
        p
        for p in sorted(tree.rglob("*.py"))
        if p.is_file() and is_test(p.relative_to(tree).as_posix())
    ]
    return _make(
        tuple((p.relative_to(tree).as_posix(), p.read_bytes()) for p in paths),
        packages,
        draw,
        with_expected,
    )


@functools.lru_cache(maxsize=64)
def _make(
    sources: tuple[tuple[str, bytes], ...], packages: frozenset[str], draw: int, with_expected: bool
) -> ProbeFiles:
    modules: dict[str, ast.Module] = {}
    for path, source in sources:
        try:
            modules[path] = ast.parse(source)
        except (SyntaxError, ValueError):
            modules[path] = ast.Module([], [])
    probes: dict[int, Probe] = {}
    functions: list[_Rewritten] = []
    for module in modules.values():
        rewriter = _Rewriter(Origins(module, packages), with_expected, draw, probes)
        _drop_docstring(module)
        rewriter.visit(module)
        functions += rewriter.functions
    if not with_expected:
        slice_tests(modules, functions, packages)
    # Every test function gets a name that does not say what it tests.
    nodes = [node for module in modules.values() for node in ast.walk(module)]
    old = sorted({n.name for n in nodes if isinstance(n, Function) and n.name.startswith("test")})
    names = {name: f"test_{number:04}" for number, name in enumerate(old)}
    for node in nodes:
        if isinstance(node, Function | ast.alias):
            node.name = names.get(node.name, node.name)
        elif isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.Attribute):
            node.attr = names.get(node.attr, node.attr)
    for module in modules.values():
        future = sum(
            isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in module.body
        )
        module.body.insert(future, ast.ImportFrom("swe_probe", [ast.alias("probe")], 0))
    texts = {
        path: ast.unparse(ast.fix_missing_locations(module)) + "\n"
        for path, module in modules.items()
    }
    return ProbeFiles(texts, probes, names)


class _Rewriter(ast.NodeTransformer):
    """Replaces the assertions of one module."""

    def __init__(
        self, origins: Origins, with_expected: bool, draw: int, probes: dict[int, Probe]
    ) -> None:
        self.module_origins = origins
        self.with_expected = with_expected
        self.draw = draw
        self.probes = probes
        self.origins: Origins | None = None
        """Those of the test function that is being rewritten."""
        self.nested = False
        self.functions: list[_Rewritten] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        _drop_docstring(node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: Function) -> ast.AST:
        if not self.with_expected:
            _drop_docstring(node)
        if self.origins is not None:
            outer = self.nested
            self.nested = True
            self.generic_visit(node)
            self.nested = outer
            return node
        if self.draw:
            draw_literals(node, self.draw)
        self.origins = self.module_origins.inside(node)
        self.generic_visit(node)
        self.functions.append((node, self.origins))
        self.origins = None
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Assert(self, node: ast.Assert | ast.With | ast.Expr) -> ast.AST | list[ast.stmt]:
        claims = claims_of(node, self.origins) if self.origins is not None else None
        if claims is None:
            return self.generic_visit(node)
        if not claims or _is_unfit(node):
            counted = ast.Expr(_call(self._new(Probe("none"))))
            return (
                [counted, node]
                if self.with_expected
                else [node]
                if _is_unfit(node)
                else [ast.Pass()]
            )
        if self.nested:
            # A callback: the package decides how often it runs, and in which order.
            claims = [replace(claim, operator="none", expected=None) for claim in claims]
        return [statement for claim in claims for statement in self._probe(claim)]

    visit_With = visit_Expr = visit_Assert

    def _probe(self, claim: Claim) -> list[ast.stmt]:
        """The statements that report what a claim observes."""
        observed = claim.observed
        expected = claim.expected
        if claim.operator in ("contains", "lacks"):
            assert isinstance(observed, ast.expr) and expected is not None
            observed = ast.Compare(expected, [ast.In()], [observed])
            expected = None
        nodes = ast.walk(observed) if isinstance(observed, ast.expr) else ()
        compares = any(
            isinstance(operator, ast.cmpop) and not isinstance(operator, ast.In)
            for operator in nodes
        )
        number = self._new(Probe(claim.operator, claim.exception, compares=compares))
        before: list[ast.stmt] = []
        if (
            isinstance(observed, list)
            and len(observed) == 1
            and isinstance(observed[0], ast.Expr | ast.Assign)
        ):
            observed = observed[0].value
        if isinstance(observed, list):
            step = f"step_{number}"
            before.append(ast.FunctionDef(step, _no_arguments(), observed, []))
            arguments: list[ast.expr] = [ast.Name(step, ast.Load())]
        else:
            arguments = [ast.Lambda(_no_arguments(), observed)]
        if self.with_expected and expected is not None:
            arguments.append(ast.Lambda(_no_arguments(), expected))
        call = _call(number, *arguments)
        return [
            *before,
            ast.Assign([claim.target], call) if claim.target is not None else ast.Expr(call),
        ]

    def _new(self, probe: Probe) -> int:
        self.probes[len(self.probes)] = probe
        return len(self.probes) - 1


def _call(number: int, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("probe", ast.Load()), [ast.Constant(number), *arguments], [])


def _no_arguments() -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _is_unfit(node: ast.AST) -> bool:
    """Whether an expression would mean something else inside another function."""
    return any(isinstance(inner, _UNFIT) for inner in ast.walk(node))


def _drop_docstring(node: ast.Module | ast.ClassDef | Function) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body[0] = ast.Pass()


def draw_literals(function: Function, seed: int) -> None:
    """Draw other literal arguments for a test that the agent could read, so that hard-coded answers
    are wrong.

    Changes are mild: numbers from 2 on grow by the same small amount, and letters of short texts
    move along the alphabet. Equal literals stay equal and keep their order. The same seed makes the
    same changes.
    """
    rng = random.Random(f"{seed} {function.name}")
    step = rng.randint(1, 3)
    turn = rng.randint(1, 5)
    moved = [alphabet[turn:] + alphabet[:turn] for alphabet in (ascii_lowercase, ascii_uppercase)]
    letters = str.maketrans(ascii_lowercase + ascii_uppercase, "".join(moved))
    kept = {id(node) for outer in ast.walk(function) for node in _kept(outer)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Constant) or id(node) in kept:
            continue
        if isinstance(node.value, str) and len(node.value) <= _MAX_DRAWN_TEXT:
            node.value = node.value.translate(letters)
        elif (
            isinstance(node.value, int | float)
            and not isinstance(node.value, bool)
            and node.value >= 2
        ):
            node.value += step


def _kept(node: ast.AST) -> Sequence[ast.AST]:
    """Literals that are names or formats rather than values."""
    if isinstance(node, ast.JoinedStr):
        return list(ast.walk(node))
    if isinstance(node, ast.Call):
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name in ("parametrize", "getattr", "setattr", "hasattr", "encode", "decode", "open"):
            return node.args[:2]
    return []
