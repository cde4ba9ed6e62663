"""The training scripts: flags that train.py has, hooks that exist, the paper's numbers, and resumption."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from envs.loading import load_attribute
from rollout.bridge.checks import check_flags
from rollout.bridge.settings import YAML_KEYS, check_keys, load_settings
from rollout.play.kept import draw
from rollout.play.loop import count_turns
from rollout.turn import Segment, StopReason
from scripts.launch import read_run, spaced_evaluations
from slime_verlog import ConfigError
from tests.cases import pairs
from tests.scripts.conftest import REPO, SCRIPTS, Command, Machine, by_flag, read_page, recorded_flags, train_flags

VARIANTS = [(), ("--disaggregated",), ("--model",)]


def other_model(script: str) -> str:
    """A model that is not the script's default."""
    return "Qwen3.5-35B-A3B" if "vlm" in script else "Qwen3-4B"


@pytest.mark.parametrize(("script", "options"), pairs(SCRIPTS, VARIANTS))
def test_every_flag_is_one_that_train_py_takes_with_as_many_values(
    command: Command, script: str, options: tuple[str, ...]
) -> None:
    more = [other_model(script)] if options == ("--model",) else []
    words = train_flags(command(script, *options, *more))
    known, seen = recorded_flags(), by_flag(words)
    assert len(seen) == sum(word.startswith("--") for word in words), "a flag is given twice"
    for flag, values in seen.items():
        assert flag in known, f"train.py has no {flag}"
        assert {"0": not values, "1": len(values) == 1, "+": len(values) > 0}[known[flag]], (flag, values)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_hook_exists_and_the_flags_pass_the_start_up_checks(command: Command, script: str) -> None:
    flags = by_flag(train_flags(command(script)))
    for flag, values in flags.items():
        if flag.endswith("-path") and values[0].split(".")[0] in ("rollout", "advantage", "inspection"):
            assert callable(load_attribute(values[0], flag))
    switches = {name[2:].replace("-", "_"): True for name, values in flags.items() if not values}
    values = {name[2:].replace("-", "_"): _number(v[0]) for name, v in flags.items() if len(v) == 1}
    args = Namespace(**{**switches, **values, "hf_checkpoint": None})
    check_flags(args, load_settings(args))


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def test_no_key_of_the_yaml_is_an_argument_of_the_framework() -> None:
    """slime sets the YAML's keys on its own args: one of the same name would change the framework, or break it."""
    assert not {f"--{name.replace('_', '-')}" for name in YAML_KEYS} & set(recorded_flags())


PAPER = {
    "run_babyai.sh": ("Qwen2.5-3B-Instruct", 256, 128, 1024, 512, 45, 340),
    "run_babaisai.sh": ("Qwen2.5-3B-Instruct", 256, 128, 1024, 384, 50, 340),
    "run_crafter.sh": ("Qwen2.5-7B-Instruct", 2048, 1024, 4096, 512, 40, 320),
}


@pytest.mark.parametrize("script", PAPER)
def test_batches_and_lengths_are_verlogs(command: Command, script: str) -> None:
    model, turns, step, prompt, response, critic_only, rollouts = PAPER[script]
    flags = by_flag(train_flags(command(script)))
    assert flags["--hf-checkpoint"][0].endswith(model)
    wanted = {
        "--rollout-batch-size": turns,
        "--global-batch-size": step,
        "--rollout-max-prompt-len": prompt,
        "--rollout-max-response-len": response,
        "--rollout-max-context-len": prompt + response,
        "--num-critic-only-steps": critic_only,
        "--num-rollout": rollouts,
        **{"--kl-coef": 0.001, "--entropy-coef": 0.001, "--eps-clip": 0.2, "--eps-clip-c": 3.0, "--value-clip": 0.5},
        **{"--lr": 1e-6, "--clip-grad": 1.0, "--rollout-temperature": 1.0, "--n-samples-per-prompt": 1},
    }
    assert {flag: float(flags[flag][0]) for flag in wanted} == wanted
    roles = yaml.safe_load(Path(flags["--megatron-config-path"][0]).read_text())["megatron"]
    assert [(r["role"], r["overrides"]["lr"]) for r in roles] == [("critic", 1e-5)]


VERLOGS_CRITIC_STEPS = {"run_babyai.sh": 100, "run_babaisai.sh": 200, "run_crafter.sh": 400}
"""Optimizer steps of Verlog's critic in its warm-up: `critic_warmup_step` draws of ten batches, 20 steps each."""


@pytest.mark.parametrize("script", VERLOGS_CRITIC_STEPS)
def test_the_warm_up_makes_as_many_optimizer_steps_as_verlogs(command: Command, script: str) -> None:
    flags = by_flag(train_flags(command(script)))
    turns, step = int(flags["--rollout-batch-size"][0]), int(flags["--global-batch-size"][0])
    warmup = check_keys(yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())).critic_warmup
    batch = Segment("task", (SimpleNamespace(prompt=None),) * turns, None, StopReason.CUT)  # type: ignore[arg-type]
    kept = [batch] * warmup.w_epoch
    drawn = [count_turns(draw(kept, warmup.fraction, step, seed)) for seed in range(warmup.w_iter)]
    assert (warmup.w_epoch * turns + sum(drawn)) / step == VERLOGS_CRITIC_STEPS[script]


WITH_CRITIC = [script for script in SCRIPTS if script not in ("run_geo3k_vlm.sh", "run_sft.sh")]


@pytest.mark.parametrize("critic_only", [0, 10, 40, 50])
@pytest.mark.parametrize("updates", [1, 97, 100, 280, 295])
def test_held_out_episodes_are_played_when_they_tell_something(critic_only: int, updates: int) -> None:
    """Never before the policy has changed, after the last update, and at most five times."""
    batches = critic_only + updates
    every = spaced_evaluations(critic_only, batches)
    evaluated = range(every, batches + 1, every)
    assert every > critic_only and evaluated[-1] == batches and len(evaluated) <= 5


def test_an_interval_of_evaluations_is_taken_as_given(command: Command) -> None:
    assert by_flag(train_flags(command("run_babyai.sh", EVAL_INTERVAL="7")))["--eval-interval"] == ["7"]


SIZES = {"TURNS": "60", "STEP_TURNS": "12", "PROMPT_LEN": "900", "RESPONSE_LEN": "100", "UPDATES": "3"}


@pytest.mark.parametrize("script", [script for script in WITH_CRITIC if script != "run_value_pretraining.sh"])
def test_sizes_model_and_yaml_come_from_the_environment(command: Command, tmp_path: Path, script: str) -> None:
    config = tmp_path / "my_task.yaml"
    preset = "preset: sao\n" if script == "run_sao.sh" else ""
    config.write_text(f"{preset}rollout_interaction_env_path: envs.recall\ntasks: [recall]\nn_env: 6\n")
    model = other_model(script)
    flags = by_flag(train_flags(command(script, **SIZES, MODEL=model, CONFIG=str(config), CRITIC_ONLY="2")))
    wanted = {"--rollout-batch-size": 60, "--global-batch-size": 12, "--rollout-max-prompt-len": 900}
    wanted |= {"--rollout-max-response-len": 100, "--num-rollout": 5, "--num-critic-only-steps": 2}
    assert {flag: int(flags[flag][0]) for flag in wanted} == wanted
    written = Path(flags["--custom-config-path"][0])
    assert written.read_text().startswith(config.read_text().rstrip("\n"))
    kind = "sao-" if script == "run_sao.sh" else ""
    assert written.parent.name == f"{kind}my_task-{model}", "it would resume another run"


def test_geo3k_and_supervised_training_take_the_yaml_and_their_own_sizes(command: Command) -> None:
    geo3k = by_flag(train_flags(command("run_geo3k_vlm.sh", PROBLEMS="4", EPISODES="3", UPDATES="7")))
    names = ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size", "--num-rollout")
    assert [geo3k[name] for name in names] == [["4"], ["3"], ["12"], ["7"]]
    sft = by_flag(train_flags(command("run_sft.sh", CONFIG="custom_configs/crafter.yaml", BATCH="8", EPOCHS="2")))
    assert sft["--global-batch-size"] == ["8"] and sft["--num-epoch"] == ["2"]
    assert "/sft-crafter-" in sft["--custom-config-path"][0]


@pytest.mark.parametrize(
    ("script", "environment", "words"),
    [
        ("run_geo3k_vlm.sh", {"TURNS": "9"}, "TURNS=9 has no meaning here: a batch is PROBLEMS x EPISODES"),
        ("run_geo3k_vlm.sh", {"PRETRAINED_CRITIC": "/c"}, "there is no critic"),
        ("run_sft.sh", {"UPDATES": "9"}, "UPDATES=9 has no meaning here: supervised training makes EPOCHS passes"),
        ("run_value_pretraining.sh", {"BATCHES": "0"}, "BATCHES must be at least 1, got 0"),
        ("run_value_pretraining.sh", {"PRETRAINED_CRITIC": "/critics/mine"}, "unset PRETRAINED_CRITIC"),
        ("run_babyai.sh", {"NUM_NODES": "two"}, "NUM_NODES must be an integer, got 'two'"),
        ("run_babyai.sh", {"OUTPUT": "/dev/null"}, "cannot write /dev/null/.*set OUTPUT"),
        ("run_babyai.sh", {"TURNS": "100"}, "STEP_TURNS=128 does not divide TURNS=100"),
        ("run_babyai.sh", {"UPDATES": "many"}, "UPDATES must be an integer, got 'many'"),
        ("run_babyai.sh", {"CONFIG": "none.yaml"}, "no CONFIG=none.yaml; give a YAML file"),
        ("run_sao.sh", {"CONFIG": "custom_configs/babyai.yaml"}, "does not train with SAO's losses: add `preset: sao`"),
    ],
)
def test_a_variable_that_a_script_cannot_obey_is_refused(
    machine: Machine, script: str, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        machine.build(script, **environment)


def test_sao_has_the_papers_numbers_on_separate_gpus(command: Command) -> None:
    """Single-rollout Asynchronous Optimization (arXiv 2607.07508): losses, learning rates, critic-only steps."""
    flags = by_flag(train_flags(command("run_sao.sh")))
    wanted = {"--eps-clip": 0.3, "--eps-clip-high": 5.0, "--lr": 1e-6, "--num-critic-only-steps": 10}
    wanted |= {"--kl-coef": 0, "--entropy-coef": 0, "--n-samples-per-prompt": 1}
    assert {flag: float(flags[flag][0]) for flag in wanted} == wanted
    assert flags["--rollout-function-path"] == ["rollout.continuous.generate_rollout"]
    assert not {"--colocate", "--eps-clip-c", "--use-tis"} & set(flags) and "--use-rollout-logprobs" in flags
    roles = yaml.safe_load(Path(flags["--megatron-config-path"][0]).read_text())["megatron"]
    assert [r["overrides"]["lr"] for r in roles] == [5e-6]
    config = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())
    settings = check_keys(config)
    assert (settings.policy_loss, settings.critic_updates, settings.lambda_critic) == ("dis", 2, 1.0)
    assert (settings.lambda_policy, settings.lambda_policy_alpha) == ("length_adaptive", 1.5)


def test_train_async_is_submitted_if_asked_for(command: Command) -> None:
    words = command("run_sao.sh", TRAIN_SCRIPT="train_async.py")
    assert any(word.endswith("/train_async.py") for word in words)


def test_later_flags_and_options_win(command: Command) -> None:
    flags = by_flag(train_flags(command("run_babyai.sh", "--model", "Qwen3-4B", "--", "--lr", "3e-6")))
    assert flags["--lr"] == ["3e-6"] and flags["--hf-checkpoint"][0].endswith("Qwen3-4B")
    config = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())
    assert config["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_job_finds_the_project(machine: Machine) -> None:
    job = machine.build("run_babyai.sh", PYTHONPATH="/mine")
    assert job.environment["PYTHONPATH"] == f"{REPO}:{machine.slime}:/root/Megatron-LM:/mine"
    assert job.environment["TENSORBOARD_DIR"] == f"{machine.output}/babyai-Qwen2.5-3B-Instruct/tensorboard"


def test_a_misspelt_option_is_answered_with_the_usage(machine: Machine) -> None:
    done = machine.run("run_babyai.sh", "--dryrun")
    assert done.returncode == 2 and "unknown option --dryrun" in done.stderr and "usage:" in done.stderr


def test_a_mistake_in_the_yaml_is_refused_before_anything_is_written(machine: Machine) -> None:
    config = machine.home / "mine.yaml"
    config.write_text("rollout_interaction_env_path: envs.recall\nn_envs: 6\n")
    with pytest.raises(ConfigError, match="unknown key 'n_envs'"):
        machine.build("run_babyai.sh", CONFIG=str(config))
    assert not machine.output.exists()


def test_supervised_training_reads_the_demonstrations_and_starts_no_engine(command: Command) -> None:
    flags = by_flag(train_flags(command("run_sft.sh", CONFIG="custom_configs/crafter.yaml")))
    assert flags["--rollout-function-path"] == ["slime.rollout.sft_rollout.generate_rollout"]
    assert flags["--prompt-data"][0].endswith("sft-crafter-Qwen2.5-3B-Instruct/demonstrations.jsonl")
    assert flags["--input-key"] == ["messages"] and "--debug-train-only" in flags and "--colocate" not in flags
    assert flags["--loss-mask-type"] == ["qwen"]
    other = by_flag(train_flags(command("run_sft.sh", "--model", "Qwen3-4B", DEMONSTRATIONS="/data/mine.parquet")))
    assert other["--loss-mask-type"] == ["qwen3"] and other["--prompt-data"] == ["/data/mine.parquet"]


def test_ppo_starts_from_what_supervised_training_saved(command: Command, tmp_path: Path) -> None:
    prior = str(tmp_path / "sft" / "actor")
    flags = by_flag(train_flags(command("run_babyai.sh", REFERENCE=prior)))
    roles = yaml.safe_load(Path(flags["--megatron-config-path"][0]).read_text())["megatron"]
    assert flags["--ref-load"] == [prior] and roles[0]["overrides"]["load"] == prior


def test_value_pretraining_takes_the_settings_of_a_ppo_script_which_then_starts_from_its_critic(
    command: Command,
) -> None:
    pretraining = by_flag(train_flags(command("run_value_pretraining.sh", RUN="crafter", BATCHES="7")))
    ppo = by_flag(train_flags(command("run_crafter.sh", PRETRAINED_CRITIC="/critics/mine")))
    own = {"--num-rollout", "--num-critic-only-steps", "--tb-experiment-name", "--custom-config-path"}
    own |= {"--load", "--save", "--megatron-config-path", "--eval-interval", "--eval-prompt-data", "--eval-top-k"}
    own |= {"--skip-eval-before-train"}
    assert {k: v for k, v in ppo.items() if k not in own} == {k: v for k, v in pretraining.items() if k not in own}
    counts = ("--num-rollout", "--num-critic-only-steps")
    assert [pretraining[name] for name in counts] == [["7"], ["7"]]
    assert [ppo[name] for name in counts] == [["280"], ["0"]]
    config = yaml.safe_load(Path(pretraining["--custom-config-path"][0]).read_text())
    assert config["value_pretraining"] == {"batches": 7, "held_out": 0.2, "passes": 50, "patience": 3}
    plain = yaml.safe_load(Path(ppo["--custom-config-path"][0]).read_text())
    assert "critic_warmup" not in config and "critic_warmup" not in plain and "value_pretraining" not in plain
    roles = yaml.safe_load(Path(ppo["--megatron-config-path"][0]).read_text())["megatron"]
    assert roles[0]["overrides"]["load"] == "/critics/mine"


def test_value_pretraining_collects_as_many_batches_as_the_warm_up_unless_told(command: Command) -> None:
    flags = by_flag(train_flags(command("run_value_pretraining.sh")))
    assert flags["--num-rollout"] == ["40"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RUN": "geo3k_vlm"}, "no scripts/run_geo3k_vlm.sh that trains a critic"),
        ({"RUN": "nothing"}, "no scripts/run_nothing.sh that trains a critic"),
        ({"UPDATES": "9"}, "BATCHES is how many batches are played"),
    ],
)
def test_value_pretraining_refuses_a_mistake_in_one_sentence(
    machine: Machine, environment: dict[str, str], words: str
) -> None:
    done = machine.run("run_value_pretraining.sh", "--dry-run", **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr
    assert done.stderr.count("\n") == 1


def test_value_pretraining_starts_the_script_that_run_names(machine: Machine) -> None:
    done = machine.run("run_value_pretraining.sh", "--dry-run", RUN="sao")
    flags = by_flag(train_flags(machine.words(done.stdout)))
    assert flags["--rollout-function-path"] == ["rollout.continuous.generate_rollout"]
    assert "What scripts/run_value_pretraining.sh submits" in done.stdout and "/critic-sao-" in done.stdout


def test_the_tutorials_script_is_one_that_slime_takes(machine: Machine) -> None:
    """The reader saves three files as the tutorial says, and asks for a dry run."""
    kind, settings, _ = read_page((REPO / "docs/examples/run_treasure.sh").read_text())
    text = (REPO / "docs/examples/treasure.yaml").read_text()
    config = machine.home / "treasure.yaml"
    config.write_text(text.replace("treasure.py", "envs.treasure").replace("inline", "process"))
    with machine.exported(CONFIG=str(config)):
        job = read_run(kind, "run_babyai.sh", settings, ["--dry-run"]).build()
    flags = by_flag(job.words)
    assert flags["--num-critic-only-steps"] == ["20"] and flags["--eval-interval"] == ["24"]
    assert len(flags) > 50 and set(flags) <= set(recorded_flags())
    assert check_keys(yaml.safe_load(job.config)).rollout_interaction_env_path == "envs.treasure"
