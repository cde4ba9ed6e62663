"""The runs that docs/results/one_gpu.md gives as commands: flags of train.py, and a model of the
imitated shape."""

import shlex

import pytest

from tests.scripts.conftest import REPO, Machine, recorded_flags

PAGE = REPO / "docs" / "results" / "one_gpu.md"


@pytest.mark.parametrize("experiment", ["throughput", "curve"])
def test_the_runs_have_flags_that_train_py_takes(machine: Machine, experiment: str) -> None:
    lines = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    [line] = [line for line in lines if f"EXPERIMENT={experiment} " in line]
    words = shlex.split(line)
    start = words.index("bash")
    variables = dict(word.split("=", 1) for word in words[:start])
    flags = machine.flags("run_babyai.sh", *words[start + 2 :], **variables)
    assert set(flags) <= set(recorded_flags())
    assert "--colocate" in flags and flags["--actor-num-gpus-per-node"] == ["1"]
    assert int(flags["--num-rollout"][0]) % int(flags["--eval-interval"][0]) == 0, (
        "the last update is not evaluated"
    )
