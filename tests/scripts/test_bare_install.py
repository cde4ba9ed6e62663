"""Everything that slime or a user calls can be imported with the base dependencies alone.

The environment is real but costs no download: a virtual environment into which the base
dependencies of this project, and theirs, are linked from the one that runs the tests. `find_spec`
finds nothing else there.
"""

import importlib.metadata
import os
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[2]
OPTIONAL = (
    "PIL",
    "jsonschema",
    "pyarrow",
    "math_verify",
    "ray",
    "megatron",
    "minigrid",
    "crafter",
    "textworld",
)
MODULES = sorted(
    ".".join(path.relative_to(REPO).with_suffix("").parts)
    for package in ("rollout", "advantage")
    for path in (REPO / package).rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def base_distributions() -> set[str]:
    """Names of the distributions that `pip install slime-verlog` brings, without any extra."""
    found: set[str] = set()
    waiting = list(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found.add(name)
            waiting += importlib.metadata.requires(name) or ()
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the base dependencies and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in base_distributions():
        for file in importlib.metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(
                    Path(str(file.locate())).parents[len(file.parts) - 1] / top
                )
    return folder / "bin" / "python"


def run_bare(python: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, env=environment, timeout=300
    )


def test_every_module_that_slime_or_a_user_calls_can_be_imported_with_the_base_dependencies_alone(
    bare_python: Path,
) -> None:
    program = f"""
import importlib, importlib.util, traceback
present = [name for name in {OPTIONAL!r} if importlib.util.find_spec(name)]
assert not present, present
for name in {["rollout", "envs", "advantage", "inspection.metrics", *MODULES]!r}:
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc().splitlines()[-1])
"""
    done = run_bare(bare_python, program)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-3000:]


def test_an_environment_without_its_package_ends_in_a_sentence_that_says_what_to_install(
    bare_python: Path,
) -> None:
    done = run_bare(
        bare_python, "from envs.loading import load_env_module; load_env_module('envs.crafter')"
    )
    assert "MissingDependencyError" in done.stderr and "install" in done.stderr.splitlines()[-1]
