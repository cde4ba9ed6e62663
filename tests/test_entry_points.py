"""Every command refuses the same mistake in the same words: one sentence, no traceback, before
anything expensive."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rollout.bridge.settings import load_settings
from rollout.tasks import try_each_task
from slime_verlog import SlimeVerlogError
from tests.cases import pairs
from tests.fixtures.warm_python import run_python

ROOT = Path(__file__).parents[1]
BROKEN_ENV = "def build_env(sample, args):\n    return {}['reward']\n"
GOOD = {"rollout_interaction_env_path": "envs.babyai", "tasks": ["goto"]}
MISTAKES = {
    "a misspelt key": ({"memry": {"n": 2}}, "unknown key 'memry'; did you mean 'memory'?"),
    "a number out of range": ({"n_env": 0}, "n_env must be at least 1, got 0"),
    "a wrong type": ({"env_workers": "two"}, "env_workers must be an integer, got 'two'"),
    "slime's own flag": (
        {"lr": 0.1},
        "'lr' is one of slime's own flags, read before the YAML; give --lr instead",
    ),
    "a misspelt option": (
        {"env": {"num_dist": 2}},
        "unknown key 'env.num_dist'; did you mean 'env.num_dists'?",
    ),
    "a misspelt task": ({"tasks": ["gotoo"]}, "unknown BabyAI task 'gotoo'; did you mean goto?"),
    "an environment that raises": (
        {"rollout_interaction_env_path": "{folder}/broken.py"},
        "task 'goto': build_env raised KeyError: 'reward' at {folder}/broken.py:2 (`return "
        "{{}}['reward']`); correct this line",
    ),
    "something other than an environment": (
        {"rollout_interaction_env_path": "{folder}/number.py"},
        "{folder}/number.py: build_env returned 1, which lacks reset, step, close",
    ),
    "a missing environment": (
        {"rollout_interaction_env_path": "{folder}/none.py"},
        "the environment file {folder}/none.py does not exist",
    ),
}
COMMANDS = {
    "evaluate": [
        "inspection",
        "evaluate",
        "{config}",
        "--player",
        "random",
        "--out",
        "{folder}/out",
    ],
    "quickstart": ["embedded.quickstart", "--config", "{config}", "--out", "{folder}/out"],
    "train": ["inspection", "train", "{config}", "--out", "{folder}/out"],
    "demonstrations": [
        "inspection.demonstrations",
        "--config",
        "{config}",
        "--out",
        "{folder}/rows.jsonl",
    ],
}


def write(folder: Path, mistake: str) -> tuple[Path, str]:
    """The YAML with the mistake, and the sentence about it."""
    keys, sentence = MISTAKES[mistake]
    filled = {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in keys.items()}
    (folder / "broken.py").write_text(BROKEN_ENV)
    (folder / "number.py").write_text("def build_env(sample, args):\n    return 1\n")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **filled}))
    return path, sentence.format(folder=folder)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_settings_and_tasks_are_refused_with_one_sentence(tmp_path: Path, mistake: str) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    path, sentence = write(tmp_path, mistake)
    with pytest.raises(SlimeVerlogError) as caught:
        try_each_task(load_settings(SimpleNamespace(custom_config_path=str(path))))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "mistake"),
    pairs(COMMANDS, ["a misspelt key", "a misspelt task", "an environment that raises"]),
)
def test_a_command_prints_the_sentence_and_nothing_else(
    tmp_path: Path, command: str, mistake: str
) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    path, sentence = write(tmp_path, mistake)
    words = [word.format(folder=tmp_path, config=path) for word in COMMANDS[command]]
    done = run_python(["-m", *words])
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip().splitlines() == [f"error: {sentence}"]


def test_a_command_whose_output_is_no_longer_read_ends_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "embedded.studies.run", "--list"]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert done.returncode == 1 and "Error" not in done.stderr
