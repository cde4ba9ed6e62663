"""slime's own dumps as episodes, written by slime's own functions where a checkout is at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inspection.view.sources import read_run
from rollout.bridge.framework import Sample
from slime_verlog import ConfigError
from tests.fixtures.checkouts import ROOT, slime_checkouts
from tests.fixtures.slime_dumps import TOKENIZER, save_like_slime, write_by_hand


@pytest.fixture(params=["by hand", "by slime"])
def dumps(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder as --dump-details leaves it, with the tokenizer."""
    folder = tmp_path / "dumps"
    if request.param == "by hand":
        write_by_hand(folder)
    else:
        checkouts = [
            path
            for path in slime_checkouts()
            if (path / "slime/observability/train_data_utils.py").exists()
        ]
        if not checkouts:
            pytest.skip(
                "set SLIME_PATH to a slime checkout to write dumps with slime's own functions"
            )
        environment = {**os.environ, "PYTHONPATH": f"{checkouts[0]}:{ROOT}"}
        command = [sys.executable, "-m", "tests.fixtures.slime_dumps", str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    TOKENIZER.save_pretrained(folder / "tokenizer")
    return folder


def test_the_turns_of_an_episode_are_put_together_across_batches(dumps: Path) -> None:
    episodes = list(read_run(dumps))
    assert [(e["seed"], e["turns"], e["stop"], e["setting"], e["success"]) for e in episodes] == [
        ("episode 6", 1, "terminated", "rollout 0", True),
        ("episode 5", 3, "terminated", "rollout 1", True),
        ("episode 7", 1, "cut", "rollout 1", False),
    ]
    turn = episodes[1]["story"][2]
    assert "You are at 2." in turn["prompt"] and turn["response"] == "THINK: é 2\nACTION: go"
    assert "".join(turn["tokens"]["text"]) == turn["response"] + "<|im_end|>"
    assert episodes[1]["valid_action_ratio"] == pytest.approx(2 / 3)


def test_what_training_computed_joins_the_tokens_of_its_turn(dumps: Path) -> None:
    tokens = list(read_run(dumps))[1]["story"][1]["tokens"]
    assert set(tokens["rollout_log_probs"]) == {-0.5} and set(tokens["loss_mask"]) == {1}
    assert set(tokens["advantages"]) == {10.0} and set(tokens["kl"]) == {9.0 - 13.0}


def test_training_data_without_its_samples_is_refused(dumps: Path) -> None:
    with pytest.raises(ConfigError, match="rollout 0 has training data alone"):
        list(read_run(dumps / "train_data" / "{rollout_id}.pt"))


def test_samples_of_another_rollout_are_one_episode_each(tmp_path: Path) -> None:
    sample = Sample()
    sample.index = 4
    sample.prompt = "2 + 2?"
    sample.response = "4 ok 4"
    sample.tokens = [1, 2, 3, 4, 5]
    sample.response_length = 3
    sample.loss_mask = [1, 0, 1]
    sample.reward = 1.0
    sample.rollout_log_probs = [-0.1, 0.0, -0.2]
    save_like_slime(tmp_path, [sample], 0)
    (episode,) = read_run(tmp_path / "rollout_data" / "{rollout_id}.pt")
    assert (episode["turns"], episode["return"], episode["success"]) == (2, 1.0, None)
    assert episode["story"][0]["prompt"] == "2 + 2?"
    assert episode["story"][1]["tokens"]["rollout_log_probs"] == [-0.2]


class Foreign:
    pass


def test_objects_of_other_packages_are_loaded_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "rollout_0.pt"
    torch.save(
        {"samples": [{"tokens": [1], "response_length": 1, "metadata": {"x": Foreign()}}]}, path
    )
    with pytest.raises(
        ConfigError, match=r"holds Python objects .*Foreign.*; if you trust it, add --trust"
    ):
        list(read_run(path))
    assert len(list(read_run(path, trusted=True))) == 1


@pytest.mark.parametrize(
    ("content", "words"), [(b"no", "is not a dump of slime"), (None, "it has no list 'samples'")]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content) if content is not None else torch.save({"a": 1}, path)
    with pytest.raises(ConfigError, match=words):
        list(read_run(path))
