"""The training scripts: flags that train.py has, hooks that exist, the paper's numbers, and
resumption."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from envs.loading import load_attribute
from rollout.bridge.checks import check_flags
from rollout.bridge.settings import YAML_KEYS, check_keys, load_settings
from scripts.launch import spaced_evaluations
from scripts.launcher.checks import read_flags
from scripts.launcher.geo3k import Geo3kVariables
from scripts.launcher.run import launch, read_run
from scripts.launcher.sft import SftVariables
from scripts.launcher.variables import PpoVariables
from slime_verlog import ConfigError
from tests.cases import pairs
from tests.scripts.conftest import (
    REPO,
    SCRIPTS,
    Machine,
    by_flag,
    read_page,
    recorded_flags,
    train_flags,
)

VARIANTS = [(), ("--disaggregated",), ("--model",)]


def other_model(script: str) -> str:
    """A model that is not the script's default."""
    return "Qwen3.5-35B-A3B" if "vlm" in script else "Qwen3-4B"


@pytest.mark.parametrize(("script", "options"), pairs(SCRIPTS, VARIANTS))
def test_every_flag_is_one_that_train_py_takes_with_as_many_values(
    machine: Machine, script: str, options: tuple[str, ...]
) -> None:
    more = [other_model(script)] if options == ("--model",) else []
    words = train_flags(machine.job(script, *options, *more))
    known = recorded_flags()
    seen = by_flag(words)
    assert len(seen) == sum(word.startswith("--") for word in words), "a flag is given twice"
    for flag, values in seen.items():
        assert flag in known, f"train.py has no {flag}"
        assert {"0": not values, "1": len(values) == 1, "+": len(values) > 0}[known[flag]], (
            flag,
            values,
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_hook_exists_and_the_flags_pass_the_start_up_checks(
    machine: Machine, script: str
) -> None:
    words = train_flags(machine.job(script))
    for flag, values in by_flag(words).items():
        if flag.endswith("-path") and values[0].split(".")[0] in (
            "rollout",
            "advantage",
            "inspection",
        ):
            assert callable(load_attribute(values[0], flag))
    args = Namespace(**{**read_flags(words), "hf_checkpoint": None})
    check_flags(args, load_settings(args))


def test_no_key_of_the_yaml_is_an_argument_of_the_framework() -> None:
    """slime sets the YAML's keys on its own args: one of the same name would change the framework,
    or break it."""
    assert not {f"--{name.replace('_', '-')}" for name in YAML_KEYS} & set(recorded_flags())


WITH_CRITIC = [script for script in SCRIPTS if script not in ("run_geo3k_vlm.sh", "run_sft.sh")]


@pytest.mark.parametrize(
    ("critic_only", "updates"), [(0, 1), (10, 97), (40, 100), (50, 280), (0, 295)]
)
def test_held_out_episodes_are_played_when_they_tell_something(
    critic_only: int, updates: int
) -> None:
    """Never before the policy has changed, after the last update, and at most five times."""
    batches = critic_only + updates
    every = spaced_evaluations(critic_only, batches)
    evaluated = range(every, batches + 1, every)
    assert every > critic_only and evaluated[-1] == batches and len(evaluated) <= 5


SIZES = {
    "TURNS": "60",
    "STEP_TURNS": "12",
    "PROMPT_LEN": "900",
    "RESPONSE_LEN": "100",
    "UPDATES": "3",
}


@pytest.mark.parametrize(
    "script", [script for script in WITH_CRITIC if script != "run_value_pretraining.sh"]
)
def test_sizes_model_and_yaml_come_from_the_environment(
    machine: Machine, tmp_path: Path, script: str
) -> None:
    config = tmp_path / "my_task.yaml"
    preset = "preset: sao\n" if script == "run_sao.sh" else ""
    config.write_text(
        f"{preset}rollout_interaction_env_path: envs.recall\ntasks: [recall]\nn_env: 6\n"
    )
    model = other_model(script)
    flags = machine.flags(script, **SIZES, MODEL=model, CONFIG=str(config), CRITIC_ONLY="2")
    wanted = {
        "--rollout-batch-size": 60,
        "--global-batch-size": 12,
        "--rollout-max-prompt-len": 900,
    }
    wanted |= {"--rollout-max-response-len": 100, "--num-rollout": 5, "--num-critic-only-steps": 2}
    assert {flag: int(flags[flag][0]) for flag in wanted} == wanted
    written = Path(flags["--custom-config-path"][0])
    assert written.read_text().startswith(config.read_text().rstrip("\n"))
    own = script.removeprefix("run_").removesuffix(".sh")
    assert written.parent.name == f"{own}-my_task-{model}", (
        "it would resume the run of another script or YAML"
    )


def test_geo3k_takes_its_own_sizes(machine: Machine) -> None:
    geo3k = machine.flags("run_geo3k_vlm.sh", PROBLEMS="4", EPISODES="3", UPDATES="7")
    names = (
        "--rollout-batch-size",
        "--n-samples-per-prompt",
        "--global-batch-size",
        "--num-rollout",
    )
    assert [geo3k[name][0] for name in names] == ["4", "3", "12", "7"]


@pytest.mark.parametrize(
    ("script", "environment", "words"),
    [
        (
            "run_geo3k_vlm.sh",
            {"TURNS": "9"},
            "TURNS=9 has no meaning here: a batch is PROBLEMS x EPISODES",
        ),
        ("run_babyai.sh", {"NUM_NODES": "two"}, "NUM_NODES must be an integer, got 'two'"),
        ("run_babyai.sh", {"OUTPUT": "/dev/null"}, "cannot write /dev/null/.*set OUTPUT"),
        ("run_babyai.sh", {"ROLLOUT_GPUS": "2"}, "ROLLOUT_GPUS=2 .* add --disaggregated"),
        ("run_babyai.sh", {"PASSES": "2"}, "PASSES has no meaning without value pretraining"),
        ("run_geo3k_vlm.sh", {"CRITIC_LR": "1e-3"}, "CRITIC_LR=1e-3 has no meaning here"),
        ("run_babyai.sh", {"TURNS": "100"}, "STEP_TURNS=128 does not divide TURNS=100"),
        (
            "run_babyai.sh",
            {"CRITIC_ONLY": "7"},
            "CRITIC_ONLY=7 and critic_warmup in CONFIG=custom_configs/babyai.yaml",
        ),
        (
            "run_sao.sh",
            {"CONFIG": "custom_configs/babyai.yaml"},
            "does not train with SAO's losses: add `preset: sao`",
        ),
    ],
)
def test_a_variable_that_a_script_cannot_obey_is_refused(
    machine: Machine, script: str, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        machine.build(script, **environment)


PLAIN = "rollout_interaction_env_path: envs.recall\ntasks: [recall]\nn_env: 32\n"
"""A user's YAML: nothing says how long the critic trains alone."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("group_estimator: rloo", "group_estimator: rloo in CONFIG=.* trains without a critic"),
        ("turn_quota: per_env", "turn_quota: per_env cannot divide 256 turns"),
        (
            "value_pretraining: {batches: 9}",
            "--num-rollout is 295 but value_pretraining.batches is 9",
        ),
        ("n_envs: 6", "unknown key 'n_envs'"),
    ],
)
def test_a_yaml_that_the_scripts_flags_contradict_is_refused_before_anything_is_printed(
    machine: Machine, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    config = machine.home / "mine.yaml"
    config.write_text(f"{PLAIN}{text}\n".replace("n_env: 32", "n_env: 15"))
    for option in ("--flat", "--dry-run"):
        with pytest.raises(ConfigError, match=words):
            printed(machine, option, CONFIG=str(config))
    assert not capsys.readouterr().out and not machine.output.exists()


@pytest.mark.parametrize("option", ["--flat", "--dry-run"])
def test_a_yaml_without_warm_up_is_named_at_the_end_of_what_is_printed(
    machine: Machine, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    config = machine.home / "mine.yaml"
    config.write_text(PLAIN)
    assert printed(machine, option, CONFIG=str(config)) == 0
    said = capsys.readouterr().err
    assert (
        "no warm-up: the critic's value head begins at random" in said and "CRITIC_ONLY=20" in said
    )
    for told in ({"CRITIC_ONLY": "20"}, {"PRETRAINED_CRITIC": "/critics/mine"}):
        assert printed(machine, option, CONFIG=str(config), **told) == 0
        assert "warm-up" not in capsys.readouterr().err


def printed(machine: Machine, option: str, **environment: str) -> int:
    """Ask `run_babyai.sh` to print its job, in this process."""
    kind, settings, own = read_page((REPO / "scripts/run_babyai.sh").read_text())
    with machine.exported(**environment):
        return launch(kind, "run_babyai.sh", settings, [*own, option])


def test_later_flags_and_options_win(machine: Machine) -> None:
    flags = machine.flags("run_babyai.sh", "--model", "Qwen3-4B", "--", "--lr", "3e-6")
    assert flags["--lr"] == ["3e-6"] and flags["--hf-checkpoint"][0].endswith("Qwen3-4B")


def test_the_job_finds_the_project_and_the_games_that_the_user_named(machine: Machine) -> None:
    """A Ray cluster that was started in another shell does not know the user's variables."""
    job = machine.build("run_alfworld.sh", PYTHONPATH="/mine", ALFWORLD_DATA="/data/alfworld")
    assert job.environment["ALFWORLD_DATA"] == "/data/alfworld"
    assert "ALFWORLD_DATA" not in machine.build("run_alfworld.sh").environment
    assert job.environment["PYTHONPATH"] == f"{REPO}:{machine.slime}:/root/Megatron-LM:/mine"
    assert (
        job.environment["TENSORBOARD_DIR"]
        == f"{machine.output}/alfworld-Qwen2.5-3B-Instruct/tensorboard"
    )


def test_a_misspelt_option_is_answered_with_the_usage(machine: Machine) -> None:
    done = machine.run("run_babyai.sh", "--dryrun")
    assert (
        done.returncode == 2
        and "unknown option --dryrun" in done.stderr
        and "usage:" in done.stderr
    )


def test_supervised_training_reads_the_demonstrations_and_starts_no_engine(
    machine: Machine,
) -> None:
    flags = machine.flags("run_sft.sh", CONFIG="custom_configs/crafter.yaml", BATCH="8", EPOCHS="2")
    assert flags["--global-batch-size"] == ["8"] and flags["--num-epoch"] == ["2"]
    assert "/sft-crafter-" in flags["--custom-config-path"][0]
    assert flags["--rollout-function-path"] == ["slime.rollout.sft_rollout.generate_rollout"]
    assert flags["--prompt-data"][0].endswith(
        "sft-crafter-Qwen2.5-3B-Instruct/demonstrations.jsonl"
    )
    assert (
        flags["--input-key"] == ["messages"]
        and "--debug-train-only" in flags
        and "--colocate" not in flags
    )
    assert flags["--loss-mask-type"] == ["qwen"]
    other = machine.flags("run_sft.sh", "--model", "Qwen3-4B", DEMONSTRATIONS="/data/mine.parquet")
    assert other["--loss-mask-type"] == ["qwen3"] and other["--prompt-data"] == [
        "/data/mine.parquet"
    ]


def test_ppo_starts_from_what_supervised_training_saved(machine: Machine, tmp_path: Path) -> None:
    prior = str(tmp_path / "sft" / "actor")
    flags = machine.flags("run_babyai.sh", REFERENCE=prior)
    roles = yaml.safe_load(Path(flags["--megatron-config-path"][0]).read_text())["megatron"]
    assert flags["--ref-load"] == [prior] and roles[0]["overrides"]["load"] == prior


def test_value_pretraining_takes_the_settings_of_a_ppo_script_which_then_starts_from_its_critic(
    machine: Machine,
) -> None:
    pretraining = machine.flags("run_value_pretraining.sh", RUN="crafter", BATCHES="7")
    ppo = machine.flags("run_crafter.sh", PRETRAINED_CRITIC="/critics/mine")
    own = "--num-rollout --num-critic-only-steps --tb-experiment-name --custom-config-path --load"
    own += " --save --megatron-config-path --eval-interval --eval-prompt-data --eval-top-k"
    own += " --skip-eval-before-train"
    differ = own.split()
    assert {k: v for k, v in ppo.items() if k not in differ} == {
        k: v for k, v in pretraining.items() if k not in differ
    }
    counts = ("--num-rollout", "--num-critic-only-steps")
    assert [pretraining[name] for name in counts] == [["7"], ["7"]]
    assert [ppo[name] for name in counts] == [["280"], ["0"]]
    config = yaml.safe_load(Path(pretraining["--custom-config-path"][0]).read_text())
    assert config["value_pretraining"] == {
        "batches": 7,
        "held_out": 0.2,
        "passes": 50,
        "patience": 3,
    }
    plain = yaml.safe_load(Path(ppo["--custom-config-path"][0]).read_text())
    assert (
        "critic_warmup" not in config
        and "critic_warmup" not in plain
        and "value_pretraining" not in plain
    )
    roles = yaml.safe_load(Path(ppo["--megatron-config-path"][0]).read_text())["megatron"]
    assert roles[0]["overrides"]["load"] == "/critics/mine"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RUN": "geo3k_vlm"}, "no scripts/run_geo3k_vlm.sh that trains a critic"),
        ({"UPDATES": "9"}, "BATCHES is how many batches are played"),
    ],
)
def test_value_pretraining_refuses_a_mistake_in_one_sentence(
    machine: Machine, environment: dict[str, str], words: str
) -> None:
    done = machine.run("run_value_pretraining.sh", "--dry-run", **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr
    assert done.stderr.count("\n") == 1


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


def test_the_page_about_clusters_names_every_variable_and_no_other() -> None:
    page = (REPO / "docs/slime.md").read_text(encoding="utf-8")
    table = page.partition("| variable | what it sets |")[2].partition("\n\n")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([A-Z_]+)`", row.split(" | ")[0])
    }
    kinds = (PpoVariables, SftVariables, Geo3kVariables)
    given = {str(field.alias) for kind in kinds for field in kind.model_fields.values()}
    assert named == given - {"PRETRAINING"}
