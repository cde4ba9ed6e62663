"""Every command reports a mistake as one sentence on stderr, without a traceback, and exits with
code 1."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.quickstart import main
from tests.fixtures.warm_python import run_python

MISTAKES = {
    "an unreadable YAML": (
        ["embedded.quickstart", "--config", "missing.yaml"],
        "YAML: missing.yaml cannot be read",
    ),
    "nothing to begin with": (
        ["embedded.quickstart", "--demonstrations", "0"],
        "--demonstrations 0 needs --model",
    ),
    "a study's budget": (
        ["embedded.studies.run", "memory", "--updates", "0"],
        "updates must be at least 1, got 0",
    ),
    "a folder without a model": (
        ["embedded.engine.server", "--model-path", "missing"],
        "'missing' is not a model folder",
    ),
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_ends_in_one_sentence(mistake: str, tmp_path: Path) -> None:
    command, sentence = MISTAKES[mistake]
    out = [] if command[0] == "embedded.engine.server" else ["--out", str(tmp_path / "out")]
    done = run_python(["-m", *command, *out])
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out/*.*"))


def test_a_model_that_the_hub_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(SystemExit) as caught:
        main(["--model", "nobody/nothing", "--out", str(tmp_path / "out")])
    sentence = "--model 'nobody/nothing' is not a folder and could not be downloaded from the hub"
    assert str(caught.value).startswith(f"error: {sentence}") and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*.*"))
