"""Every command of the documents is run by a test, or its block says what it needs. The tutorial is
run as written."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from inspection.command import PARTS, module_of
from tests.cases import some
from tests.fixtures.warm_python import run_python
from tests.scripts.conftest import recorded_flags
from tests.test_docs import DOCUMENTS, REPOSITORY, write_readme

BLOCK = re.compile(r'^ *```bash(?: title="([^"]*)")?\n(.*?)^ *```', re.MULTILINE | re.DOTALL)
NEEDS = re.compile(
    r"needs (a GPU|GPUs|a model|a run|slime|the network|root|hours|a checkout on the cluster).*|.*\.sh"
)
EXAMPLES = REPOSITORY / "docs" / "examples"

RUN_BY = {
    r"bash scripts/(install|run_tests)\.sh.*|source \.venv/bin/activate": "tests/scripts/test_job.py",
    r"bash scripts/run_quickstart\.sh": "tests/embedded/test_quickstart.py",
    r"bash scripts/run_ablation\.sh .*|python -m embedded\.studies\.run .*": "tests/embedded/studies/test_ablation.py",
    r"bash scripts/run_\w+\.sh --dry-run": "tests/scripts/test_run_scripts.py",
    r"bash scripts/run_\w+\.sh --flat": "tests/scripts/test_flat.py",
    r"python -m inspection\.demonstrations .*": "tests/inspection/test_demonstrations.py",
    r"python -m envs\.swe\.validate .*": "tests/envs/swe/test_swe_validate.py",
    r"slime-verlog (check|play) custom_configs/agent\.yaml": "tests/envs/agent/test_agent_programs.py",
    r"slime-verlog (check|play) custom_configs/tools_mcp\.yaml": "tests/envs/tools/test_mcp_tools.py",
    r"slime-verlog export .*": "tests/inspection/test_export.py",
    r"slime-verlog train my\.yaml .*": "tests/test_docs.py",
}
"""Test files that run commands of the documents. This file runs all others that begin with
`slime-verlog`."""


def commands(document: Path) -> list[tuple[str, str]]:
    """(title of the block, command) for each command of a page, without comments and lists of
    flags."""
    found = []
    for title, body in BLOCK.findall(document.read_text(encoding="utf-8")):
        lines = body.replace("\\\n", " ").splitlines()
        words = [
            " ".join(shlex.split(line, comments=True))
            for line in lines
            if not line.startswith("--")
        ]
        found += [(title, line) for line in words if line]
    return found


def tutorial() -> list[str]:
    """The commands of the tutorial that need nothing but this machine."""
    return [line for title, line in commands(REPOSITORY / "docs" / "tutorial.md") if not title]


def is_run_elsewhere(line: str) -> bool:
    """Whether another test file runs the command."""
    return any(re.fullmatch(pattern, line) for pattern in RUN_BY)


def others() -> list[str]:
    """The commands of the other pages that need nothing but this machine, and that no other test
    file runs."""
    found = [line for document in DOCUMENTS for title, line in commands(document) if not title]
    own = [line for line in found if line.startswith("slime-verlog") and not is_run_elsewhere(line)]
    return [line for line in dict.fromkeys(own) if line not in tutorial()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_run_by_a_test_or_says_what_it_needs(document: Path) -> None:
    known = {*tutorial(), *others()}
    for title, line in commands(document):
        if title:
            assert NEEDS.fullmatch(title), (
                f"{document.name}: say what the block needs, not {title!r}"
            )
        else:
            assert is_run_elsewhere(line) or line in known, (
                f"{document.name}: no test runs {line!r}"
            )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_of_slime_verlog_in_a_document_exists(document: Path) -> None:
    for _, line in commands(document):
        words = shlex.split(line)
        if words[:1] == ["slime-verlog"] and words[1] in PARTS:
            parser = argparse.ArgumentParser()
            module_of(words[1]).add_arguments(parser)
            parser.parse_args(words[2:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_in_a_block_of_flags_is_one_that_train_py_takes(document: Path) -> None:
    blocks = [
        body
        for _, body in BLOCK.findall(document.read_text(encoding="utf-8"))
        if body.startswith("--")
    ]
    flags = [word for body in blocks for word in body.split() if word.startswith("--")]
    assert not set(flags) - set(recorded_flags())


def test_the_tests_that_run_the_commands_exist() -> None:
    assert not [test for test in RUN_BY.values() if not (REPOSITORY / test).exists()]


BRIEFLY = """
import embedded.launch
from inspection.command import main

embedded.launch.IMITATION = {"epochs": 1}
main()
"""
"""`slime-verlog` with an imitation that ends after one pass over its turns."""


def run(folder: Path, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run one `slime-verlog` command as a user does, in `folder`."""
    name, *words = [*shlex.split(line), *more]
    assert name == "slime-verlog"
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    program = ["-c", BRIEFLY] if words[0] == "train" else ["-m", "inspection"]
    return run_python([*program, *words], folder, environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works: beside the shipped files, with the environments of the tutorial and
    of the README."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("treasure.py", "treasure.yaml"):
        shutil.copy(EXAMPLES / name, folder)
    shutil.copy(EXAMPLES / "treasure.yaml", folder / "my_env.yaml")
    write_readme(folder)
    for name in ("custom_configs", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


SMALL = ("--set-flag", "rollout_batch_size=32", "--set-flag", "global_batch_size=16")
SHORTER = {
    "train": ("--updates", "1", "--episodes", "4", *SMALL),
    "evaluate": ("--episodes", "8"),
    "branch": ("--times", "2"),
    "--sample": ("--sample", "12"),
    "custom_configs/swe.yaml": (
        "--set",
        "tasks=[toolz_interleave]",
        "--set",
        "eval.tasks=[toolz_update_in_copies]",
    ),
}
"""Options that make a command short enough for a test, by a word of it."""


def shorter(line: str) -> list[str]:
    """The options that make this command short enough."""
    return [option for word in line.split() for option in SHORTER.get(word, ())]


SLOW = re.compile(
    r"slime-verlog train.*|.*harbor.*|.*check custom_configs/swe.*|slime-verlog evaluate custom_configs/agent.*"
    r"|.*outputs/treasure/run.*"
)
"""Commands that take more than ten seconds even when they are shortened, or read what one of these
wrote."""


def some_lines(lines: Iterable[str]) -> list[Any]:
    listed = list(lines)
    return some(listed, [line for line in listed if not SLOW.match(line)])


@pytest.mark.parametrize(
    "line", some_lines(line for line in tutorial() if line.startswith("slime-verlog"))
)
def test_the_tutorial_runs(folder: Path, line: str) -> None:
    done = run(folder, line, *shorter(line))
    assert done.returncode == 0, done.stderr


PACKAGES = {"custom_configs/agent.yaml": "openai"}
"""Optional packages that a command needs, by a word of it; the test is skipped only where such a
package is missing."""


@pytest.mark.parametrize("line", some_lines(others()))
def test_the_commands_of_the_other_pages_run(folder: Path, line: str) -> None:
    for package in {PACKAGES[word] for word in line.split() if word in PACKAGES}:
        pytest.importorskip(package, reason=f"pip install {package} enables this test")
    # So few turns teach a critic nothing, which would end the run.
    accepts = ["--set", "value_pretraining.least_explained_variance=null"] * (
        "value_pretraining" in line
    )
    done = run(folder, line, *shorter(line), *accepts)
    assert done.returncode == 0, done.stderr
