"""`--flat` prints a run as one file in slime's style: the same job, the same YAML files, and docs/examples has it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cases import pairs
from tests.scripts.conftest import REPO, Command, job_environment, train_flags
from tests.scripts.test_run_scripts import SCRIPTS

EXAMPLE = REPO / "docs" / "examples" / "run_crafter.sh"
SUBMITTED = 'ray() { [ "$1" != job ] || printf "%s\\0" ray "$@"; }; python3() { :; }; source "$1"'
"""The words of `ray job submit`, while `ray start` and the demonstrations do nothing."""


def flat(script: str, *options: str, **environment: str) -> str:
    """What the script prints, on a machine that has neither slime nor a home."""
    command = ["bash", str(REPO / "scripts" / script), "--flat", *options]
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def submit(file: Path, tmp_path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Run a flat file beside the same folders that `command` gives to the dry run."""
    folders = {"SLIME_PATH": str(tmp_path / "slime"), "MODELS": str(tmp_path / "models"), "OUTPUT": str(output)}
    return subprocess.run(
        ["bash", "-euc", SUBMITTED, "-", str(file)],
        cwd=REPO,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **folders},
    )


def test_the_example_in_the_docs_is_what_the_script_prints() -> None:
    assert EXAMPLE.read_text() == flat("run_crafter.sh"), "out of date; run: python scripts/write_reference.py"


def test_the_example_in_the_docs_is_valid_shell() -> None:
    assert subprocess.run(["bash", "-n", str(EXAMPLE)], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(("script", "options"), pairs(SCRIPTS, [(), ("--disaggregated", "--", "--seed", "7")]))
def test_the_file_submits_the_job_of_the_dry_run_with_the_same_yaml_files(
    command: Command, tmp_path: Path, script: str, options: tuple[str, ...]
) -> None:
    dry = command(script, *options)
    file = tmp_path / "flat.sh"
    file.write_text(flat(script, *options))
    output = tmp_path / "flat-out"
    done = submit(file, tmp_path, output)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[:-1]
    assert train_flags(words) == [word.replace(str(tmp_path / "out"), str(output)) for word in train_flags(dry)]
    given = {name: value.replace(str(tmp_path / "out"), str(output)) for name, value in job_environment(dry).items()}
    assert job_environment(words) == given
    for written in (tmp_path / "out").rglob("*.yaml"):
        mine = output / written.relative_to(tmp_path / "out")
        assert mine.read_text() == written.read_text().replace(str(tmp_path / "out"), str(output))


def test_printing_writes_nothing(tmp_path: Path) -> None:
    flat("run_crafter.sh", OUTPUT=str(tmp_path / "out"), MODELS=str(tmp_path / "models"))
    assert not list(tmp_path.iterdir())


def test_a_run_that_exists_is_not_started_again_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "crafter-Qwen2.5-7B-Instruct" / "critic").mkdir(parents=True)
    done = submit(EXAMPLE, tmp_path, tmp_path)
    assert done.returncode == 2 and "resume it with: bash scripts/run_crafter.sh" in done.stderr


def test_a_word_with_a_dollar_sign_is_not_read_as_a_variable(command: Command, tmp_path: Path) -> None:
    command("run_babyai.sh")
    file = tmp_path / "flat.sh"
    file.write_text(flat("run_babyai.sh", "--", "--tb-experiment-name", "it's $HOME"))
    assert submit(file, tmp_path, tmp_path / "new").stdout.split("\0")[-2] == "it's $HOME"
