"""The runs that docs/results/one_gpu.md gives as commands: flags of train.py, and a model of the imitated shape."""

import re
import shlex

import pytest

from embedded.studies.study import load_study
from embedded.warmstart.policy import PolicySize
from tests.scripts.conftest import REPO, Command, by_flag, recorded_flags, train_flags

FOLDER = REPO / "docs" / "results" / "one_gpu"
PAGE = FOLDER.with_suffix(".md")


@pytest.mark.parametrize("experiment", ["throughput", "curve"])
def test_the_runs_have_flags_that_train_py_takes(command: Command, experiment: str) -> None:
    lines = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    [line] = [line for line in lines if f"EXPERIMENT={experiment} " in line]
    words = shlex.split(line)
    start = words.index("bash")
    variables = dict(word.split("=", 1) for word in words[:start])
    flags = by_flag(train_flags(command("run_babyai.sh", *words[start + 2 :], **variables)))
    assert set(flags) <= set(recorded_flags())
    assert "--colocate" in flags and flags["--actor-num-gpus-per-node"] == ["1"]
    assert int(flags["--num-rollout"][0]) % int(flags["--eval-interval"][0]) == 0, "the last update is not evaluated"


def test_the_model_file_describes_the_policy_that_the_study_imitates() -> None:
    text = (FOLDER / "babyai-14m.sh").read_text(encoding="utf-8")
    written = {name: int(number) for name, number in re.findall(r"^  (--[\w-]+) (\d+)$", text, re.MULTILINE)}
    size = PolicySize(**load_study(str(FOLDER / "study.yaml")).warm["size"])
    assert written == {
        "--num-layers": size.layers,
        "--hidden-size": size.hidden,
        "--ffn-hidden-size": size.ffn,
        "--num-attention-heads": size.heads,
        "--num-query-groups": size.kv_heads,
        "--rotary-base": 10_000,
    }
