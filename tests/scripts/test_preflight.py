"""The scripts' command lines through slime's own parser, and mistakes refused before anything
starts."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from embedded.warmstart.policy import train_tokenizer
from rollout.preflight import REFUSES_NESTED_REGIONS
from tests.fixtures.broken_envs import BROKEN
from tests.scripts.conftest import (
    REPO,
    SCRIPTS,
    Machine,
    by_flag,
    job_environment,
    recorded_own_flags,
    train_flags,
)
from tests.slime.cpu.harness import IMPORTS, Slime, find_slime

pytestmark = pytest.mark.slow

PATCHED_MEGATRON = "--use-gated-attention"
"""A flag of slime's Qwen3.5 models that only the Megatron in slime's image has; on any other,
preflight refuses it."""
OWN_PACKAGES = ("run_alfworld.sh", "run_swe.sh", "run_textworld.sh")


@pytest.fixture(scope="module")
def slime() -> Slime:
    return find_slime()


def write_model(folder: Path, flags: dict[str, list[str]]) -> None:
    """The Hugging Face config that the script's model flags describe, and a tokenizer with a chat
    template."""
    number = {
        name: int(flags[name][0]) for name in flags if flags[name] and flags[name][0].isdigit()
    }
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
    train_tokenizer(["go forward"], vocab_size=300).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if "get_qwen3_5_vl_model_provider" in flags.get("--spec", ()):
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3VLProcessor",
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_reference(folder: Path) -> None:
    """What tells a finished conversion: Megatron names the checkpoint that it wrote last."""
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


def without(words: list[str], flag: str) -> list[str]:
    """The command line without one flag and its values."""
    at = words.index(flag)
    end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
    return words[:at] + words[end:]


IMAGE_PYTHON = """
export PYTHONPATH={imports}:$PYTHONPATH SLIME_CPU_WORK=$HOME TORCHDYNAMO_DISABLE=1
exec {python} "$@"
"""
"""The `python3` of slime's image, on a CPU that pretends to be a GPU older than Blackwell."""


@pytest.fixture
def image(slime: Slime, tmp_path: Path) -> Machine:
    """A fresh shell beside the slime checkout, where `python3` has what slime needs."""
    machine = Machine(tmp_path, slime.path)
    machine.install("python3", IMAGE_PYTHON.format(imports=IMPORTS, python=slime.python))
    return machine


def write_weights(words: list[str]) -> None:
    """What `prepare_model.sh` leaves, as far as preflight looks at it."""
    flags = by_flag(train_flags(words))
    for name in ("--hf-checkpoint", "--ref-load"):
        folder = Path(flags[name][0]) if name in flags else None
        if folder and not folder.exists():
            write_model(folder, flags) if name == "--hf-checkpoint" else write_reference(folder)


def preflight(
    image: Machine, words: list[str], script: str = "train.py"
) -> subprocess.CompletedProcess[str]:
    """Preflight as the script would run it, for a job whose words may have been changed."""
    write_weights(words)
    variables = {**image.variables, **job_environment(words)}
    command = ["python3", "-m", "rollout.preflight", script, *train_flags(words)]
    return subprocess.run(
        command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "options", [(), ("--disaggregated",), ("--model", "Qwen3-4B")], ids=" ".join
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_of_every_script_ends_with_the_verdict_of_slimes_own_parser(
    image: Machine, script: str, options: tuple[str, ...]
) -> None:
    """From a fresh shell, where slime and the model are there."""
    if options and script != "run_babyai.sh":
        pytest.skip("one script stands for all: the variants come from their common part")
    words = image.job(script, *options)
    write_weights(words)
    done = image.run(script, "--dry-run", *options)
    assert done.stdout.startswith("#!/usr/bin/env bash")
    if PATCHED_MEGATRON in words and done.returncode == 1:
        assert f"knows {PATCHED_MEGATRON}" in done.stderr, done.stderr
        done = preflight(image, without(words, PATCHED_MEGATRON))
    if done.returncode == 1 and script in OWN_PACKAGES:
        # Environments are made last, after parser and checks, and not every one is installed beside
        # slime.
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert errors and re.search("install (it|them) with", errors[0]), done.stderr[-3000:]
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert "preflight: flags, YAML and environments are fine\n" in (done.stdout + done.stderr)


MISTAKES = [
    (("--global-batch-size", "100"), "--global-batch-size 100"),
    (("--lora-rank", "8"), "--lora-rank"),
    (("--lr", "fast"), "argument --lr"),
]


@pytest.mark.parametrize(
    ("mistake", "words"), MISTAKES, ids=[mistake[0][0] for mistake in MISTAKES]
)
def test_a_mistake_ends_with_one_sentence_before_anything_starts(
    image: Machine, mistake: tuple[str, ...], words: str
) -> None:
    done = preflight(image, [*image.job("run_babyai.sh"), *mistake])
    assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


def test_a_broken_environment_ends_with_one_sentence_before_anything_starts(image: Machine) -> None:
    config, sentence = BROKEN["process exit"].write(image.home)
    flags = image.job("run_babyai.sh")
    place = flags.index("--custom-config-path") + 1
    keys = yaml.safe_load(Path(flags[place]).read_text(encoding="utf-8"))
    del keys["env"], keys["eval"]
    config.write_text(
        yaml.safe_dump({**keys, **yaml.safe_load(config.read_text(encoding="utf-8"))})
    )
    flags[place] = str(config)
    done = preflight(image, flags)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and sentence in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


REFUSED = [
    (
        "run_sao.sh",
        ("--use-tis",),
        (),
        "use_rollout_logprobs and use_tis cannot be set at the same time",
    ),
    ("run_sao.sh", (), ("--use-rollout-logprobs",), "give --use-rollout-logprobs"),
    ("run_babyai.sh", (), ("--data-source-path",), "--data-source-path is missing"),
]
"""Script, flags to add, flags to leave out though slime has defaults for them, and what the error
says."""


@pytest.mark.parametrize(("script", "more", "missing", "words"), REFUSED)
def test_losses_and_hooks_that_do_not_fit_are_refused(
    image: Machine, script: str, more: tuple[str, ...], missing: tuple[str, ...], words: str
) -> None:
    flags = [*image.job(script), *more]
    for flag in missing:
        flags = without(flags, flag)
    done = preflight(image, flags)
    assert done.returncode == 1 and words in done.stderr


def test_train_async_with_shared_gpus_is_refused(image: Machine) -> None:
    flags = image.job("run_babyai.sh")
    done = preflight(image, flags, "train_async.py")
    assert (
        done.returncode == 1 and "--colocate cannot share their GPUs: leave it out" in done.stderr
    )


def test_continuous_batches_without_staleness_are_refused(image: Machine) -> None:
    flags = image.job("run_sao.sh")
    path = Path(by_flag(train_flags(flags))["--custom-config-path"][0])
    path.write_text(path.read_text().replace("max_staleness: 1", "max_staleness: 0"))
    done = preflight(image, flags)
    assert done.returncode == 1 and "max_staleness must be at least 1, got 0" in done.stderr


def test_a_memory_saver_without_nested_regions_is_refused(slime: Slime, image: Machine) -> None:
    package = image.home / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "entrypoint.py").write_text(REFUSES_NESTED_REGIONS)
    folders = f"{image.home}:{IMPORTS}"
    image.install("python3", IMAGE_PYTHON.format(imports=folders, python=slime.python))
    done = preflight(image, image.job("run_babyai.sh"))
    assert done.returncode == 1 and f"{package} refuses the nested memory regions" in done.stderr


def test_flags_without_effect_are_named_and_the_verdict_comes_last(image: Machine) -> None:
    vain = "--gamma 0.9 --lambd 0.9 --custom-rm-path a.b --custom-reward-post-process-path a.c"
    vain += " --custom-generate-function-path a.d"
    flags = image.job("run_babyai.sh", "--", *vain.split())
    roles = Path(by_flag(train_flags(flags))["--megatron-config-path"][0])
    roles.write_text(
        roles.read_text().replace("overrides: {", "overrides: {gamma_step: 0.5, gamma: 0.5, ")
    )
    done = preflight(image, flags)
    warned = done.stderr.splitlines()
    assert done.returncode == 0 and all(line.startswith("warning: ") for line in warned)
    named = ("--gamma is", "--lambd is", "--custom-rm-path", "--custom-reward-post-process-path")
    for words in (
        *named,
        "--custom-generate-function-path",
        "sets gamma for the critic",
        "sets gamma_step 0.5",
    ):
        assert sum(words in line for line in warned) == 1, (words, warned)
    assert done.stdout == "preflight: flags, YAML and environments are fine\n"


def test_the_recorded_flags_of_slimes_own_parser_are_those_of_this_checkout(
    image: Machine, slime: Slime
) -> None:
    """Run tests/scripts/record_flags.py after a change in slime, then decide in
    rollout/bridge/slime_flags.yaml."""
    program = "from tests.scripts.record_flags import own_flags; print(*own_flags())"
    path = f"{IMPORTS}:{slime.path}:{REPO}"
    variables = {**image.variables, "PYTHONPATH": path}
    done = subprocess.run(
        ["python3", "-c", program], capture_output=True, text=True, env=variables, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - recorded_own_flags() == set()


@pytest.mark.parametrize(
    "more",
    [
        ("--rollout-function-path", "rollout.continuous.generate_rollout", "--use-tis"),
        ("--debug-train-only", "--load-debug-rollout-data", "/data/{rollout_id}.pt"),
    ],
    ids=["continuous batches", "training on saved batches with the engine's flags"],
)
def test_other_ways_to_train_pass(image: Machine, more: tuple[str, ...]) -> None:
    done = preflight(image, image.job("run_babyai.sh", "--", *more))
    assert done.returncode == 0, done.stderr
