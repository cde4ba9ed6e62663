"""What surrounds the code tells the truth: packages, declared dependencies, the built wheel,
workflows, hooks."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from setuptools import find_packages

from inspection.command import VERSION

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("rollout", "envs", "advantage", "embedded", "inspection")
EXAMPLES = REPOSITORY / "envs" / "harbor" / "examples"
"""Task folders, whose Python files are data."""
PROFILE = REPOSITORY / "envs" / "swe" / "sandbox" / "docker_seccomp.json"
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))

DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "megatron": "megatron-core"}
"""Import names that differ from the distribution's name by more than an underscore."""

BRINGS_ITSELF = {"slime", "balrog", "fast_downward", "verifiers"}
"""Imported if installed, never installed by us: slime, BALROG, textworld[pddl]'s planner, and
verifiers."""

INDIRECT = {
    "basedpyright": "a command",
    "codespell": "a command",
    "httpx": "slime imports it",
    "mcp-server-git": "a command",
    "mcp-server-time": "a command",
    "minihack": "imported by name",
    "mkdocs": "a command; scripts/docs_site.py is its hook",
    "mkdocs-material": "the site's theme",
    "mkdocstrings-python": "a plugin of mkdocs",
    "pytest-asyncio": "a pytest plugin",
    "pytest-timeout": "a pytest plugin",
    "pytest-xdist": "a pytest plugin",
    "ruff": "a command",
    "scienceworld": "imported by name",
    "textarena": "imported by name",
}
"""Declared, but imported by no module of ours."""


def _distribution(name: str) -> str:
    return DISTRIBUTIONS.get(name, name).replace("_", "-")


def _names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements}
    return names - {PROJECT["project"]["name"]}


def _declared() -> set[str]:
    """The base dependencies and those of every extra."""
    project = PROJECT["project"]
    extras = (name for extra in project["optional-dependencies"].values() for name in extra)
    return _names([*project["dependencies"], *extras])


def _imports(folders: tuple[str, ...]) -> Iterator[tuple[Path, str, bool]]:
    """File, distribution and whether the module's import runs it, for each import of a third
    party's package."""
    ours = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} | {"slime_verlog"}
    ours.add("encoding")  # the neighbour of envs/swe/verdict/pytest_script.py in the sandbox
    files = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    for path in [*files, REPOSITORY / "slime_verlog.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for name in (
                {module.split(".")[0] for module in modules} - ours - set(sys.stdlib_module_names)
            ):
                yield path.relative_to(REPOSITORY), _distribution(name), node in tree.body


def test_every_package_is_included_and_typed() -> None:
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    found = set(find_packages(str(REPOSITORY), include=include))
    files = (path for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py"))
    folders = {path.parent for path in files if EXAMPLES not in path.parents}
    assert found == {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders}
    assert all((REPOSITORY / name / "py.typed").exists() for name in PACKAGES)


def test_every_imported_package_is_declared() -> None:
    allowed = _declared() | {_distribution(name) for name in BRINGS_ITSELF}
    missing = {f"{path}: {name}" for path, name, _ in _imports(PACKAGES) if name not in allowed}
    assert not missing


def test_every_declared_package_is_imported() -> None:
    imported = {name for _, name, _ in _imports((*PACKAGES, "benchmarks", "tests"))}
    assert _declared() - imported == set(INDIRECT)


def test_rollout_and_advantage_import_base_dependencies_only() -> None:
    base = _names(PROJECT["project"]["dependencies"])
    outside = {
        f"{path}: {name}"
        for path, name, at_import in _imports(("rollout", "advantage"))
        if at_import and name not in base
    }
    assert not outside


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy, so that no build folder is left in the
    checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE", "slime_verlog.py"):
        shutil.copy(REPOSITORY / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


KEPT = (".py", ".j2", ".typed", ".html", ".css", ".js", ".yaml")


def test_the_wheel_holds_every_module_template_asset_study_example_and_type_marker(
    wheel: set[str],
) -> None:
    kept = (path for name in PACKAGES for path in (REPOSITORY / name).rglob("*"))
    expected = {
        str(path.relative_to(REPOSITORY))
        for path in kept
        if path.is_file()
        and "__pycache__" not in path.parts
        and (path.suffix in KEPT or EXAMPLES in path.parents or path == PROFILE)
    }
    assert sum(name.endswith(".j2") for name in expected) > 5
    installed = {name for name in wheel if ".dist-info/" not in name}
    assert installed == expected | {"slime_verlog.py"}


def _workflow(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _commands(path: Path) -> list[str]:
    steps = [step for job in _workflow(path)["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_scripts_tests_and_modules_that_exist(path: Path) -> None:
    workflow = _workflow(path)
    assert workflow["name"] == path.stem and workflow[True], "YAML reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and all(
            "uses" in step or "run" in step for step in job["steps"]
        )
    for command in _commands(path):
        for name in re.findall(r"(?:scripts|tests)/[\w./-]*", command):
            assert (REPOSITORY / name).exists(), f"{path.name} calls {name}, which does not exist"
        for modules in re.findall(r'-c "import ([^"]+)"', command):
            for module in (name for name in modules.split(", ") if name.split(".")[0] in PACKAGES):
                file = REPOSITORY / module.replace(".", "/")
                assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), (
                    f"no module {module}"
                )


def test_citation_and_command_name_the_version_of_the_project() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert str(citation["version"]) == project["version"] == VERSION
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in project["authors"]
    ]
