"""`--flat` prints a run as one file in slime's style: the same job, with the same YAML files."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cases import pairs
from tests.scripts.conftest import REPO, SCRIPTS, Machine, job_environment, train_flags

SUBMITTED = 'ray() { [ "$1" != job ] || printf "%s\\0" ray "$@"; }; python3() { :; }; source "$1"'
"""The words of `ray job submit`, while `ray start` and the demonstrations do nothing."""


def flat(machine: Machine, script: str, *options: str) -> str:
    """What the script prints where there are no folders of slime."""
    variables = {"PATH": machine.variables["PATH"], "HOME": "/nonexistent"}
    command = ["bash", str(REPO / "scripts" / script), "--flat", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def submit(text: str, machine: Machine, output: Path) -> subprocess.CompletedProcess[str]:
    """Run a printed script beside the machine's slime and models."""
    file = machine.home / "flat.sh"
    file.write_text(text)
    folders = {**machine.variables, "OUTPUT": str(output), "PATH": os.environ["PATH"]}
    words = ["bash", "-euc", SUBMITTED, "-", str(file)]
    return subprocess.run(words, cwd=REPO, capture_output=True, text=True, env=folders)


@pytest.mark.parametrize(
    ("script", "options"), pairs(SCRIPTS, [(), ("--disaggregated", "--", "--tag", "it's $HOME")])
)
def test_the_file_submits_the_job_of_the_dry_run_with_the_same_yaml_files(
    machine: Machine, script: str, options: tuple[str, ...]
) -> None:
    dry = machine.job(script, *options)
    output = machine.home / "flat-out"
    done = submit(flat(machine, script, *options), machine, output)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[:-1]
    wanted = [word.replace(str(machine.output), str(output)) for word in dry]
    assert train_flags(words) == train_flags(wanted) and job_environment(words) == job_environment(
        wanted
    )
    for written in machine.output.rglob("*.yaml"):
        mine = output / written.relative_to(machine.output)
        assert mine.read_text() == written.read_text().replace(str(machine.output), str(output))


def test_a_run_that_exists_is_not_started_again_from_its_beginning(machine: Machine) -> None:
    (machine.output / "crafter-Qwen2.5-7B-Instruct" / "critic").mkdir(parents=True)
    done = submit(flat(machine, "run_crafter.sh"), machine, machine.output)
    assert done.returncode == 2 and "resume it with: bash scripts/run_crafter.sh" in done.stderr
