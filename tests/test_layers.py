"""Folders are layers: no two of them import each other, and the main hook loads few of the project's files."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "advantage", "envs", "embedded", "inspection", "benchmarks")
GROUND = {
    *("rollout.turn", "rollout.errors", "rollout.spec", "advantage.errors", "envs.errors"),
    "embedded.arguments",
}
"""Plain records, settings and errors, which every folder may import; they import nothing of their own package."""
MAX_FILES = 50


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """The project's modules that are imported at module level, for the type checker too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        yield from (name for name in names if name in MODULES)
        yield from imported(node)


IMPORTS = {name: set(imported(ast.parse(path.read_text(encoding="utf-8")))) for name, path in MODULES.items()}


def folder_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_the_ground_imports_nothing_of_its_own_package() -> None:
    for module in GROUND:
        package = module.partition(".")[0]
        assert not {name for name in IMPORTS[module] if name.partition(".")[0] == package}, module


def test_no_two_folders_import_each_other() -> None:
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, names in IMPORTS.items():
        for name in names - GROUND:
            here, there = folder_of(module), folder_of(name)
            if here != there:
                edges[here, there].append(f"{module} imports {name}")
    mutual = {pair for pair in edges if pair < pair[::-1] and pair[::-1] in edges}
    assert not mutual, "\n".join(line for a, b in mutual for line in edges[a, b] + edges[b, a])


def test_the_fixed_turn_hook_loads_few_files() -> None:
    code = (
        "import sys, rollout.fixed_turn\n"
        f"names = {(*PACKAGES, 'slime_verlog')!r}\n"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] in names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    files = done.stdout.split()
    assert len(files) <= MAX_FILES, f"{len(files)} files: {' '.join(files)}"
