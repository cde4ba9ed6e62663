"""The scripts' command lines through slime's own parser, and mistakes refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.scripts.conftest import REPO, Command, by_flag, train_flags
from tests.slime.cpu.harness import IMPORTS, Slime, find_slime

pytestmark = pytest.mark.slow

SCRIPTS = sorted(
    path.name for path in (REPO / "scripts").glob("run_*.sh") if "lib/slime.sh" in path.read_text(encoding="utf-8")
)
OWN_PACKAGES = ("run_alfworld.sh", "run_swe.sh", "run_textworld.sh")


@pytest.fixture(scope="module")
def slime() -> Slime:
    return find_slime()


def write_model(folder: Path, flags: dict[str, list[str]]) -> None:
    """The Hugging Face config that the script's model flags describe."""
    number = {name: int(flags[name][0]) for name in flags if flags[name] and flags[name][0].isdigit()}
    config = {
        "model_type": "qwen2" if "--add-qkv-bias" in flags else "qwen3",
        "architectures": ["Qwen2ForCausalLM" if "--add-qkv-bias" in flags else "Qwen3ForCausalLM"],
        "num_hidden_layers": number["--num-layers"],
        "hidden_size": number["--hidden-size"],
        "intermediate_size": number["--ffn-hidden-size"],
        "num_attention_heads": number["--num-attention-heads"],
        "num_key_value_heads": number["--num-query-groups"],
        "vocab_size": number["--vocab-size"],
        "rope_theta": number["--rotary-base"],
        "rms_norm_eps": float(flags["--norm-epsilon"][0]),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in flags,
        "max_position_embeddings": 32768,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def preflight(slime: Slime, words: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    flags = by_flag(words)
    (work / "out").mkdir(exist_ok=True)
    for name in ("--hf-checkpoint", "--ref-load"):
        folder = Path(flags[name][0]) if name in flags else None
        if folder and not folder.exists():
            write_model(folder, flags) if name == "--hf-checkpoint" else folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (IMPORTS, slime.path, REPO))),
        "SLIME_CPU_WORK": str(work),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [str(slime.python), "-m", "rollout.preflight", *words]
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("options", [(), ("--disaggregated",), ("--model", "Qwen3-4B")], ids=" ".join)
@pytest.mark.parametrize("script", SCRIPTS)
def test_slimes_own_parser_takes_every_script(
    command: Command, slime: Slime, tmp_path: Path, script: str, options: tuple[str, ...]
) -> None:
    if options and script != "run_babyai.sh":
        pytest.skip("one script stands for all: the variants come from their common part")
    done = preflight(slime, train_flags(command(script, *options, slime=slime.path)), tmp_path)
    if done.returncode == 2 and script in OWN_PACKAGES:
        # Environments are made last, after parser and checks, and not every one is installed beside slime.
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert errors and "install it" in errors[0], done.stderr[-3000:]
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert "preflight: flags, YAML and environments are fine" in done.stdout


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (("--global-batch-size", "100"), "--global-batch-size 100"),
        (("--num-critic-only-steps", "3"), "--num-critic-only-steps is 3"),
        (("--advantage-estimator", "grpo"), "--advantage-estimator is grpo"),
        (("--rollout-max-context-len", "40000"), "max_position_embeddings 32768"),
    ],
)
def test_a_mistake_ends_with_a_sentence_before_anything_starts(
    command: Command, slime: Slime, tmp_path: Path, mistake: tuple[str, str], words: str
) -> None:
    done = preflight(slime, train_flags(command("run_babyai.sh", "--", *mistake, slime=slime.path)), tmp_path)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1]
