"""Folders are layers: no cycle of imports connects them, and the main hook loads few of the
project's files."""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "advantage", "envs", "embedded", "inspection", "benchmarks")
RECORDS = {
    *("rollout.turn", "rollout.errors", "rollout.spec", "advantage.errors", "envs.errors"),
    *("embedded.arguments", "embedded.run.folder"),
}
"""Records, settings, errors and files, which every folder may import; they import nothing of their
own package."""
BELOW = {
    "inspection": {"embedded", "rollout", "envs", "advantage"},
    "embedded": {"rollout", "envs", "advantage"},
    "rollout": {"envs", "advantage"},
    "envs": set(),
    "advantage": set(),
}
"""The packages that each package imports."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
}


def imported(tree: ast.AST, in_functions: bool = False) -> Iterator[str]:
    """The project's modules that are imported at module level, for the type checker too, or also in
    functions."""
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and not in_functions
        ):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        yield from (name for name in names if name in MODULES)
        yield from imported(node, in_functions)


IMPORTS = {
    name: set(imported(ast.parse(path.read_text(encoding="utf-8"))))
    for name, path in MODULES.items()
}


def folder_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def refuse_circles(edges: Mapping[str, Collection[str]]) -> None:
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for the type checker count too. A package's `__init__` counts
    by its names."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    refuse_circles({name: set(imported(tree, True)) - {name} for name, tree in trees.items()})


def test_records_import_nothing_of_its_own_package() -> None:
    for module in RECORDS:
        package = module.partition(".")[0]
        assert not {name for name in IMPORTS[module] if name.partition(".")[0] == package}, module


@pytest.mark.parametrize("package", BELOW)
def test_packages_import_those_below_them_and_no_others(package: str) -> None:
    """Imports inside of functions count too."""
    files = [path for name, path in MODULES.items() if name.partition(".")[0] == package]
    names = {
        name
        for path in files
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), True)
    }
    assert {name.partition(".")[0] for name in names} - {package} == BELOW[package]


def test_no_folders_import_each_other_in_a_cycle() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for module, names in IMPORTS.items():
        edges[folder_of(module)] |= {folder_of(name) for name in names - RECORDS} - {
            folder_of(module)
        }
    refuse_circles(edges)
